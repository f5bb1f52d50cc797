"""The engine's counters, as /health shows them and as Prometheus text under both families of names."""

import threading
from collections import Counter
from dataclasses import dataclass, field

BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)

# tensorfold name, vLLM name, kind, help
FAMILIES = (
    ("requests_running", "num_requests_running", "gauge", "Requests in prefill or decode."),
    ("requests_waiting", "num_requests_waiting", "gauge", "Requests queued until a lane is free."),
    ("kv_cache_usage_ratio", "kv_cache_usage_perc", "gauge", "Share of the window in use, 0 to 1."),
    ("requests_total", "request_success_total", "counter", "Requests finished."),
    ("prompt_tokens_total", "prompt_tokens_total", "counter", "Prompt tokens done."),
    ("generation_tokens_total", "generation_tokens_total", "counter", "Tokens generated."),
    ("mtp_drafted_total", "spec_decode_num_draft_tokens_total", "counter", "Tokens drafted."),
    ("mtp_accepted_total", "spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens kept."),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "Seconds to the first token."),
    ("request_latency_seconds", "e2e_request_latency_seconds", "Seconds a request took."),
)
HEALTH_TOTALS = (
    "requests_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "prefill_seconds_total",
    "decode_seconds_total",
    "rounds_total",
)


@dataclass
class Histogram:
    """Counts of observations up to each bound."""

    total: float = 0.0
    count: int = 0
    up_to: dict[float, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.total += value
        self.count += 1
        for bound in BUCKETS:
            self.up_to[bound] += value <= bound


class Counters:
    """Everything that is counted; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"prefill_seconds_total": 0.0, "decode_seconds_total": 0.0}
        self._histograms = {name: Histogram() for name, _, _ in HISTOGRAMS}

    def add(self, **amounts: int) -> None:
        """Raise totals."""
        with self._lock:
            self._totals.update(amounts)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Raise a total of seconds."""
        with self._lock:
            self._seconds[name] += seconds

    def observe(self, name: str, value: float) -> None:
        """Add one observation to a histogram."""
        with self._lock:
            self._histograms[name].observe(value)

    def health(self) -> dict[str, float]:
        """The totals that /health shows."""
        with self._lock:
            values = {name: round(self._seconds.get(name, self._totals[name]), 3) for name in HEALTH_TOTALS}
            values["completion_tokens_total"] = self._totals["generation_tokens_total"]
            values["drafted_total"] = self._totals["mtp_drafted_total"]
            values["accepted_total"] = self._totals["mtp_accepted_total"]
            return values

    def prometheus(self, gauges: dict[str, float]) -> str:
        """The Prometheus text, every family under its own and its vLLM name."""
        lines: list[str] = []
        for name, value in sorted(self.health().items()):
            lines += _family(f"tensorfold_health:{name}", "counter", "As /health shows it.", value)
        with self._lock:
            for own, vllm, kind, text in FAMILIES:
                value = gauges[own] if kind == "gauge" else self._totals[own]
                lines += _family(f"tensorfold:{own}", kind, text, value)
                lines += _family(f"vllm:{vllm}", kind, text, value)
            for own, vllm, text in HISTOGRAMS:
                lines += _histogram(f"tensorfold:{own}", text, self._histograms[own])
                lines += _histogram(f"vllm:{vllm}", text, self._histograms[own])
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, value: float) -> list[str]:
    label = '{pool="main"}' if name == "tensorfold:kv_cache_usage_ratio" else ""
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        f"{name}{label} {value:g}" if value % 1 else f"{name}{label} {int(value)}",
    ]


def _histogram(name: str, text: str, histogram: Histogram) -> list[str]:
    buckets = [f'{name}_bucket{{le="{bound:g}"}} {count}' for bound, count in histogram.up_to.items()]
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} histogram",
        *buckets,
        f'{name}_bucket{{le="+Inf"}} {histogram.count}',
        f"{name}_sum {histogram.total:.6f}",
        f"{name}_count {histogram.count}",
    ]
