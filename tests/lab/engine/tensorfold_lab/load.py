"""Loading: the log lines of the real engine, at the scripted pace, with the node's memory going down."""

import time
from dataclasses import dataclass

from .arguments import Settings
from .control import Control
from .faults import Faults
from .lifetime import Lifetime
from .log import log, tag
from .model_files import Model, engram_present, read_a_little, write_token_map
from .node_memory import NodeMemory
from .rank_cache import RankCache

LAYERS = 43
STAGES = 3
STEPS = LAYERS + STAGES
WARM_LENGTHS = (1, 17, 33, 131, 514, 1024, 2113)


@dataclass(frozen=True)
class Loader:
    """Loads one rank."""

    settings: Settings
    model: Model
    control: Control
    faults: Faults
    memory: NodeMemory
    lifetime: Lifetime

    def load(self) -> bool:
        """Load everything; returns whether the Engram tables are there."""
        write_token_map(self.model)
        cache = RankCache(self.settings.rank, self.model.fingerprint, self.control.now.rank_cache_bytes)
        found = cache.found
        tag(f"rank {self.settings.rank}: rank cache {'found' if found else 'to be written'}: {cache.place}")
        self._load_weights(cache, found)
        tables = engram_present()
        if not tables:
            tag("WARNING: no Engram tables (TF_DS_ENGRAM): serving degraded")
        self._say_warm_up()
        return tables

    def _load_weights(self, cache: RankCache, found: bool) -> None:
        rank, script, started = self.settings.rank, self.control.now, time.monotonic()
        seconds = script.load_seconds_later if found else script.load_seconds_first
        for step in range(1, STEPS + 1):
            self.lifetime.pause(started + seconds * step / STEPS - time.monotonic())
            for shard in self.model.shards[step - 1 :: STEPS]:
                read_a_little(shard)
            self.memory.take(script.meminfo_gib / STEPS)
            if not found:
                cache.write_up_to(step / STEPS)
            if step in {*range(5, LAYERS, 5), LAYERS}:
                took, gib = time.monotonic() - started, script.meminfo_gib * step / STEPS
                tag(f"rank {rank}: layers 0..{step - 1} loaded ({took:.1f} s, {gib:.1f} GiB)")
            if step == LAYERS // 2:
                self.faults.pass_through("loading")
        if not found:
            cache.finish()
        tag(f"rank {rank}: DSpark ({STAGES} stages) loaded")

    def _say_warm_up(self) -> None:
        settings, script = self.settings, self.control.now
        if settings.vision and settings.rank == 0:
            tag("vision tower on rank 0: 24 blocks loaded")
        tag(f"warm-up: {len(WARM_LENGTHS)} prompt lengths {','.join(map(str, WARM_LENGTHS))}")
        if settings.parallel > 1:
            tag(f"--parallel warm-up: {settings.parallel * 2} round graphs captured")
            streams = f"{settings.parallel} streams share one window of {settings.context} tokens"
            tag(f"--parallel {settings.parallel}: {streams}")
        holds = script.meminfo_gib
        tag(f"rank {settings.rank}: allocator ceiling {holds + 4:.2f} GiB (holds {holds:.2f}, floor 2.00)")


def say_opening(settings: Settings) -> None:
    """The first lines of a rank, with noise of NCCL that means no harm."""
    place = f"CUDA, rank {settings.rank} of 2"
    tag(f"loading {settings.model}: DeepSeek-V4.1-Flash (deepseek_v41) on {place}")


def say_network_noise() -> None:
    """Lines that look like trouble and are none."""
    log("NCCL INFO NET/Plugin: Spectrum-X (SPCX) NCCL plugin is not supported")
    log("NCCL WARN ibv_query_port_speed failed on rocep1s0f1 errno 93")
