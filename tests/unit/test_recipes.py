"""The recipes say what their sources say, and their log patterns meet the engine's own lines."""

import re
from pathlib import Path

import pytest

from sparkserve import image_facts
from sparkserve.engine_logs import LogLine, find_trouble, match_failure, match_phase
from sparkserve.errors import SparkserveError
from sparkserve.lock import Lock, LockedImage
from sparkserve.manifest import Manifest
from sparkserve.placeholders import PLACEHOLDER, PLACEHOLDERS
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe, shipped_names
from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME, TEMPLATE_NAME
from tests.lab.recipe import write_lab_recipe, write_recipe

DEFAULT = "tensorfold-1017"
OLD_TABLES = {
    "824db4881320407ac340736d14dcee5ecd748c27d0f5836b8127ecc2e3781b0f",
    "976330f4954338e1ad8b508c32aa912032c7ad908959fd53c8307650fe4520ed",
}
ROUTING_BIAS = "3af36227242af726f0642a191262c5d66f87b33ae38764c3e9c4ad439e3de819"


def lab_recipe(directory: Path) -> Recipe:
    commits = {MODEL_NAME: "a" * 40, ENGRAM_NAME: "b" * 40, TEMPLATE_NAME: "c" * 40}
    write_lab_recipe(directory, commits=commits, engine_repository="http://hub.lab/git/engine.git", base="lab/base:1")
    return load_recipe(str(directory))


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_is_whole(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.why
    if recipe.image.dockerfile:
        assert "ARG BASE" in recipe.file(recipe.image.dockerfile).decode()
        assert re.fullmatch(rf"sparkserve/{name}:[0-9a-f]{{12}}", image_facts.tag_of(recipe, _lock(recipe)))
    if recipe.chat_template and recipe.chat_template.prologue:
        assert recipe.file(recipe.chat_template.prologue)
    assert all(name in PLACEHOLDERS for text in recipe.templated_texts() for name in PLACEHOLDER.findall(text))


def _lock(recipe: Recipe) -> Lock:
    locked = LockedImage(base="base@sha256:" + "0" * 64, engine_repository="r", engine_commit="1" * 40)
    return Lock(schema=1, recipe=recipe.name, weights=(), image=locked)


def test_the_default_recipe_holds_the_published_facts() -> None:
    recipe = load_recipe(DEFAULT)
    model, engram = recipe.weights
    assert (model.repository, model.revision, model.files) == (MODEL_NAME, "afc7aa0a", 43)
    assert (engram.repository, engram.revision, engram.files) == (ENGRAM_NAME, "1bae0e10", 2)
    assert engram.include == ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")
    assert set(engram.deny_sha256) == OLD_TABLES
    parameters = recipe.parameters
    assert parameters.model_name == "DeepSeek-V4.1-Flash-1017"
    assert (parameters.context, parameters.requests, parameters.drafts) == (1_048_576, 4, 5)
    assert parameters.thinking is False
    assert recipe.ports.api == 8888
    assert recipe.launch.env["TF_DS_ENGRAM"] == engram.mount
    assert recipe.image.engine_revision == "deepseek-v41-tp2"


def test_other_recipes_hold_the_published_facts() -> None:
    forum, mia = load_recipe("vllm-1017").launch.more_argv, load_recipe("vllm-mia-exl3")
    assert forum[forum.index("--max-cudagraph-capture-size") + 1] == "32"
    assert "DSV41_EXL3_MOE_X" not in mia.launch.env
    code = {figure.value: figure.name for figure in mia.figures if "code" in figure.name}
    assert "as configured" in code[45], "the kernel that gives 56 is not set"
    assert "DSV41_EXL3_MOE_X=2,12,8" in code[56]
    older = load_recipe("tensorfold-bertholomus")
    (warning,) = older.warnings
    for text in ("vision-routing-bias.safetensors", "64,944 bytes", ROUTING_BIAS):
        assert text in warning
    assert "90b68e0" in older.why
    base, overrides = load_recipe(DEFAULT).memory, load_recipe("tensorfold-1017-bf16-overrides")
    added = overrides.memory.weights_gib - base.weights_gib
    assert overrides.derived[0].expected_bytes * (1 - 2.9 / 16) / 2**30 == pytest.approx(added, abs=0.05)
    assert overrides.memory.required_gib == pytest.approx(base.required_gib + added)


def test_nothing_lowers_free_memory_before_the_engine_is_ready() -> None:
    sysctls = load_recipe(DEFAULT).tuning.sysctl
    assert sysctls["vm.swappiness"] == "0"
    assert not {"vm.min_free_kbytes", "vm.watermark_scale_factor", "vm.watermark_boost_factor"} & set(sysctls)


def test_names_of_a_node_come_from_that_node() -> None:
    env = load_recipe(DEFAULT).launch.env
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert env[name] == "${link.interface}"
    assert "${link.hcas}" in env["NCCL_IB_HCA"]
    assert env["TF_RDMA_DEVICES"] == "${link.hcas}"
    assert env["NCCL_IB_GID_INDEX"] == "${link.gid_index}"


# What the engines print: a line of a good start with the phase that it tells, a line of trouble with whether it ends
# the start (fatal) and whether it breaks a pair that serves (serving).
GOOD_LINES = {
    "[tensorfold] loading /model: DeepSeek-V4.1-Flash (deepseek_v41) on CUDA, rank 0 of 2": "reading the configuration",
    "[tensorfold] rank 1: layers 0..15 loaded (12.3 s, 33.1 GiB)": "loading layers 15",
    "[tensorfold] rank 0: DSpark (3 stages) loaded": "drafting layers loaded",
    "[tensorfold] warm-up: 7 prompt lengths 1,17,33": "warming up",
    "[tensorfold] --parallel warm-up: 8 round graphs captured": "warming up for several requests",
    "[tensorfold] rank 0: allocator ceiling 103.00 GiB (holds 99.00, floor 2.00)": "fitting memory",
    "[tensorfold] DeepSeek-V4.1 engine ready: 2 rank(s), context 1048576, DSpark 5 drafts": "engine ready",
    "[tensorfold] rank 1 ready in 61.0 s, following rank 0": "serving",
    "[tensorfold] serving some-model at http://127.0.0.1:8888/v1 on CUDA, rank 0 of 2 (loaded in 61 s)": "serving",
    "NCCL INFO NET/Plugin: Spectrum-X (SPCX) NCCL plugin is not supported": "",
    "NCCL WARN ibv_query_port_speed failed on rocep1s0f1 errno 93": "",
}
FATAL, WARNING, BROKEN = (True, False), (False, False), (True, True)
BAD_LINES = {
    "[tensorfold] WARNING: no Engram tables (TF_DS_ENGRAM): serving degraded": FATAL,
    "torch.distributed.DistStoreError: Timed out ... 1/2 clients joined": FATAL,
    "[tensorfold] RuntimeError: NCCL error 6: remote process exited or network error": BROKEN,
    "NCCL WARN Bootstrap : no socket interface found for NCCL_SOCKET_IFNAME=enp1s0f1np1": BROKEN,
    "NCCL WARN Call to ibv_modify_qp failed with 61 No data available errno 61": FATAL,
    "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory": FATAL,
    "ValueError: --vision and --parallel must be the same on every rank": FATAL,
    "[tensorfold] the lane is broken (rank 1 lost); every step fails from now on": BROKEN,
    "this lane lost a rank (timeout); restart it on every rank": BROKEN,
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": FATAL,
    "leaves 3.1 GiB, under the 4.0 GiB hard floor; fit: 2 stream(s)": FATAL,
    "tensorfold: error: unrecognized arguments: --wrong": FATAL,
    "NVRM: nvCheckOkFailedNoLog: NV_ERR_NO_MEMORY from _memdescAllocInternal": WARNING,
    "[tensorfold] the ranks planned different rounds; its requests fail, serving goes on": WARNING,
    "[tensorfold] rank 0 finished layers; waiting for rank 1": WARNING,
    "OSError: [Errno 28] No space left on device: '/ranks/rank0.bin.new'": FATAL,
    "exit code 70": WARNING,
}
VLLM_LINES = {
    "(MainProcess pid=6) INFO 11-30 08:12:58 [serve.py:224] Launching vLLM (v0.32.0) headless multiproc executor, with "
    "head node address 10.0.0.1:29521 for torch.distributed process group.": "starting the engine",
    "(EngineCore pid=18) INFO 11-30 08:13:22 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='/model', speculative_config=None": "starting the engine",
    "(Worker pid=12) INFO 11-30 08:13:26 [parallel_state.py:1906] world_size=2 rank=1 local_rank=0 "
    "distributed_init_method=tcp://10.0.0.1:29521 backend=gloo": "waiting for the other rank",
    "(Worker pid=12) INFO 11-30 08:13:52 [parallel_state.py:2350] rank 1 in world size 2 is assigned as DP rank 0, "
    "PP rank 0, PCP rank 0, TP rank 1": "joined the other rank",
    "(Worker_TP1 pid=12) INFO 11-30 08:13:52 [cpu_model_runner.py:68] Starting to load model /model...": (
        "loading weights"
    ),
    "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 72.47it/s]": "loading weights 1/1",
    "(Worker_TP0 pid=27) INFO 11-30 08:13:54 [default_loader.py:501] Loading weights took 0.03 seconds": (
        "weights loaded"
    ),
    "(EngineCore pid=18) INFO 11-30 08:13:56 [kv_cache_utils.py:2327] CPU KV cache size: 2,097,152 tokens, Maximum "
    "concurrency for 2,048 tokens per request: 1024.00x": "sizing the cache",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  51%|█████     | 18/35 [00:03<00:03,  5.43it/s]": (
        "capturing graphs"
    ),
    "INFO:     Application startup complete.": "serving",
    "get_mempolicy: Operation not permitted": "",
}
VLLM_BAD_LINES = {
    "(EngineCore pid=18) ValueError: Free memory on device cuda:0 (85.92/121.69 GiB) on startup is less than desired "
    "GPU memory utilization (0.92, 111.95 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes.": FATAL,
    "(EngineCore pid=18) ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
    "when initializing the engine.": FATAL,
    "(EngineCore pid=18) ValueError: To serve at least one request with the models's max seq len (1048576), (12.0 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (3.38 GiB).": FATAL,
    "(Worker_TP0 pid=30) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": FATAL,
    "NVRM: nvCheckOkFailedNoLog: NV_ERR_NO_MEMORY from _memdescAllocInternal": WARNING,
    "spark-1:30:30 [0] misc/ibvwrap.cc:292 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev "
    "rocep1s0f1:1, curr state INIT, next state RTR, local GID index 3": FATAL,
    "spark-1:30:30 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory": FATAL,
    "spark-1:30:30 [0] NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.2<41234>": BROKEN,
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.": BROKEN,
    "(EngineCore pid=18) INFO 11-30 08:14:56 [shm_broadcast.py:501] No available shared memory broadcast block found "
    "in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. "
    "compilation, weight/kv cache quantization).": WARNING,
    "(EngineCore pid=22) ERROR 11-30 08:08:36 [core.py:1512] EngineCore encountered a fatal error.": BROKEN,
    "(APIServer pid=6) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace "
    "(above) for the root cause.": BROKEN,
    "(APIServer pid=6) ERROR 11-30 08:08:37 [core_client.py:610] Engine core proc EngineCore_DP0 died unexpectedly, "
    "shutting down client.": BROKEN,
    "(MainProcess pid=7) ERROR 11-30 22:31:45 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly "
    "(exit code: -9), shutting down executor.": BROKEN,
    "(APIServer pid=6) WARNING 11-30 08:07:41 [system_utils.py:255] Found ulimit of 20000 and failed to automatically "
    "increase with error current limit exceeds maximum limit. This can cause fd limit errors like "
    "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n": WARNING,
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.": FATAL,
    "(Worker_TP1 pid=12) OSError: [Errno 28] No space left on device": FATAL,
    "(Worker_TP0 pid=30) RuntimeError: topk=1152 has no decode kernel": FATAL,
    "(APIServer pid=6) ValueError: Out of range float values are not JSON compliant: nan": WARNING,
    "vllm: error: unrecognized arguments: --wrong": FATAL,
}
SGLANG_LINES = {
    "Loading safetensors checkpoint shards:  38% Completed | 14/37 [00:20<00:30,  1.35s/it]": "loading weights 14/37",
    "[2026-11-30 08:19:34 TP0] Load weight end. elapsed=312.45 s, type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail "
    "mem=40.24 GB, mem usage=68.31 GB.": "weights loaded",
    "[2026-11-30 08:19:35 TP1] KV Cache is allocated. #tokens: 182345, K size: 13.91 GB, V size: 13.91 GB": (
        "sizing the cache"
    ),
    "[2026-11-30 08:19:41] The server is fired up and ready to roll!": "serving",
    "[2026-11-30 08:14:21 TP0] Load weight begin. avail mem=108.55 GB": "",
}
SGLANG_BAD_LINES = {
    "[2026-11-30 08:14:20 TP1] RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other "
    "processes. pre_model_load_memory=88.1, local_gpu_memory=108.5, local_gpu_memory * 0.9=97.6": FATAL,
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.": FATAL,
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": FATAL,
    "spark-1:30:30 [0] NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.2<41234>": BROKEN,
    "NVRM: nvCheckOkFailedNoLog: NV_ERR_NO_MEMORY from _memdescAllocInternal": WARNING,
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.": BROKEN,
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.": FATAL,
    "spark-1:30:30 [0] NCCL WARN Call to ibv_modify_qp failed with 61 No data available errno 61": FATAL,
    "spark-1:30:30 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory": FATAL,
    "OSError: [Errno 28] No space left on device: '/root/.cache/kernels'": FATAL,
    "launch_server.py: error: unrecognized arguments: --wrong": FATAL,
}
LINES = {
    "tensorfold": (GOOD_LINES, BAD_LINES),
    "vllm": (VLLM_LINES, VLLM_BAD_LINES),
    "sglang": (SGLANG_LINES, SGLANG_BAD_LINES),
}


@pytest.mark.parametrize("name", shipped_names())
def test_every_line_of_the_engine_is_known_and_every_pattern_has_a_line(name: str) -> None:
    recipe = load_recipe(name)
    good, bad = LINES[recipe.engine]
    for line, phase in good.items():
        assert match_phase(line, recipe.phases) == phase, line
        assert match_failure(line, recipe.failures) is None, line
    for line, (fatal, serving) in bad.items():
        found = match_failure(line, recipe.failures)
        assert found is not None, line
        assert (found.fatal, found.serving) == (fatal, serving), line
        assert found.cause
        assert found.advice
    for pattern in [*(phase.pattern for phase in recipe.phases), *(failure.pattern for failure in recipe.failures)]:
        assert any(re.search(pattern, line) for line in (*good, *bad)), pattern


def test_the_cause_of_a_dead_vllm_and_not_the_echo() -> None:
    worker, core = (
        "(Worker_TP0 pid=30) ERROR 11-30 08:08:36 [multiproc_executor.py:1063] ",
        "(EngineCore pid=22) ERROR ",
    )
    lines = [
        "(APIServer pid=6) WARNING 11-30 08:07:41 [system_utils.py:255] Found ulimit of 20000 and failed to "
        "automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like "
        "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
        f"{worker}WorkerProc hit an exception.",
        f"{worker}Traceback (most recent call last):",
        f'{worker}  File "/opt/vllm/vllm/v1/worker/cpu_worker.py", line 1055, in worker_busy_loop',
        f"{worker}    raise InductorError(e, currentframe()).with_traceback(",
        f"{worker}torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found",
        f"{core}11-30 08:08:36 [core.py:1512] EngineCore encountered a fatal error.",
    ]
    found = find_trouble([LogLine(float(n), 0, line) for n, line in enumerate(lines)], load_recipe("smoke").failures)
    assert found is not None
    assert found.line.text == lines[5]


def test_the_lab_recipe_differs_where_it_must(tmp_path: Path) -> None:
    lab, default = lab_recipe(tmp_path / "lab"), load_recipe(DEFAULT)
    assert [weights.revision for weights in lab.weights] == ["a" * 40, "b" * 40]
    assert lab.image.base_digest == ""
    assert lab.image.architecture == "any"
    assert (lab.parameters.context, lab.verification.needle_tokens) == (65_536, 4_000)
    assert "/lab" in [mount.target for mount in lab.container.mounts]
    assert (lab.launch, lab.phases, lab.failures) == (default.launch, default.phases, default.failures)
    assert set(image_facts.build_files(lab)) == {"Dockerfile"}
    assert b"stand-in" in image_facts.build_files(lab)["Dockerfile"].content
    assert "@" not in (tmp_path / "lab/recipe.toml").read_text().replace("@ signs", "")


def test_the_lab_recipe_of_real_vllm_is_whole(tmp_path: Path) -> None:
    marks = {
        "MODEL": "lab/tiny",
        "MODEL_COMMIT": "a" * 40,
        "BASE": "lab/base:1",
        "ENGINE_REPOSITORY": "http://hub.lab/e",
    }
    write_recipe(tmp_path / "lab-vllm-cpu", "lab-vllm-cpu", {**marks, "ENGINE_COMMIT": "b" * 40})
    recipe = load_recipe(str(tmp_path / "lab-vllm-cpu"))
    assert set(image_facts.build_files(recipe)) == {"Dockerfile", "install.sh", "wheels.txt"}
    assert recipe.verification.untrained
    # What is proved with it must be what the other vLLM recipes use.
    smoke = load_recipe("smoke")
    assert (recipe.phases, recipe.failures) == (smoke.phases, smoke.failures)
    assert recipe.counters
    assert smoke.counters
    assert recipe.counters.moving == smoke.counters.moving


def test_overrides_from_another_source_have_caches_of_their_own() -> None:
    found = {}
    for name in (DEFAULT, "tensorfold-1017-bf16-overrides"):
        recipe = load_recipe(name)
        weights = tuple(
            Manifest(name=item.name, repository=item.repository, commit=item.revision.ljust(40, "0"), files=())
            for item in recipe.weights
        )
        found[name] = Lock(schema=1, recipe=name, weights=weights, image=LockedImage()).weights_id
        assert "${weights.id}" in recipe.container.mounts[0].source
    assert len({*found.values()}) == 2


def test_an_engine_directory_in_a_recipe_is_refused(tmp_path: Path) -> None:
    recipe = lab_recipe(tmp_path / "lab")
    (tmp_path / "lab/engine").mkdir()
    (tmp_path / "lab/engine/file").touch()
    with pytest.raises(SparkserveError, match="engine's own source"):
        image_facts.build_files(recipe)


def test_long_flags_are_those_of_all_ranks_and_switches() -> None:
    (flags,) = image_facts.long_flags(load_recipe(DEFAULT)).values()
    assert {"--tp", "--master-port", "--host", "--no-thinking", "--mtp-drafts", "--no-drafts"} <= set(flags)
    assert len(flags) == len(set(flags))
