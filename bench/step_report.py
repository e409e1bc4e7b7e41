"""What the timed variants of a training step come to: a table, and results for ``trimegatron bench report``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trimegatron.bench.operators import count_phases
from trimegatron.bench.results import OURS, Parameter, Result
from trimegatron.bench.rounds import Contender, Contenders, ratios, spread
from trimegatron.bench.trace import peak_bytes_on_cpu, read, record
from trimegatron.metrics import flops_per_token, peak_flops
from trimegatron.model.spec import GPTSpec

PARTS = ("forward", "backward", "optimizer")
FORMULA = "model FLOPs a token = 3 · (layers · (24 h² + 4 s h) + 2 h v)"


@dataclass(frozen=True)
class Counts:
    """What a step of one variant comes to; None is what cannot be seen here."""

    peak_bytes: int
    operator_calls: int | None
    launches: int | None


@dataclass(frozen=True)
class StepReport:
    """Of one configuration. ``variants`` have had their turns; ``name`` is the configuration's."""

    name: str
    spec: GPTSpec
    micro_batch_size: int
    variants: Contenders

    @property
    def seq_length(self) -> int:
        return self.spec.max_position_embeddings

    @property
    def dtype(self) -> str:
        return str(self.spec.dtype).removeprefix("torch.")

    @cached_property
    def flops_per_token(self) -> float:
        return flops_per_token(self.spec, self.seq_length)

    @cached_property
    def peak(self) -> float | None:
        """FLOP/s of the device in this dtype, where we know it."""
        return peak_flops(self.spec.device) if self.spec.dtype == torch.bfloat16 else None

    @cached_property
    def counts(self) -> dict[str, Counts]:
        """Counted in steps of their own, which are not timed."""
        return {name: count(variant, self.spec.device) for name, variant in self.variants.items()}

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """What times depend on."""
        spec = self.spec
        on_cpu: dict[str, Parameter] = {"threads": torch.get_num_threads()} if spec.device.type == "cpu" else {}
        return on_cpu | {
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "num_attention_heads": spec.num_attention_heads,
            "seq_length": self.seq_length,
            "micro_batch_size": self.micro_batch_size,
            "vocab_size": spec.vocab_size,
            "dropout": spec.hidden_dropout,
            "dtype": self.dtype,
            "device": spec.device.type,
        }

    def rates(self, name: str) -> list[float]:
        """Tokens a second in each round."""
        return [self.micro_batch_size * self.seq_length / seconds for seconds in self.variants[name].medians()]

    def lines(self) -> Iterator[str]:
        """For a reader."""
        spec, on_gpu = self.spec, self.spec.device.type == "cuda"
        where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        yield (
            f"{self.name}: {spec.num_layers} layers of {spec.hidden_size}, {self.micro_batch_size} × {self.seq_length} "
            f"tokens, {spec.vocab_size} words, {self.dtype}, dropout {spec.hidden_dropout:g}; {where}, "
            f"torch {torch.__version__}"
        )
        yield f"{FORMULA} = {self.flops_per_token:.4g}; MFU = FLOPs a token · tokens/s / peak; " + (
            f"peak {self.peak / 1e12:g} TFLOP/s" if self.peak else "the peak is unknown, so there is no MFU"
        )
        first = f"median (min … max) of {len(self.variants[OURS].turns)} rounds"
        yield (
            f"{first:36}{'ms a step':>28}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}"
            + "".join(f"{part:>10}" for part in PARTS)
            + f"{'peak MB':>9}{'calls':>7}{'launches':>9}"
        )
        for name in self.variants:
            yield self._line(name)
        yield "–: operator calls are not seen inside compiled code, and only a GPU has launches"
        for name in self.variants:
            if name != OURS:
                times = spread(ratios(self.variants, name, OURS), "{:.3f}")
                yield f"a step of {name} takes {times} times as long as ours"

    def _line(self, name: str) -> str:
        variant, found = self.variants[name], self.counts[name]
        flops = statistics.median(self.rates(name)) * self.flops_per_token
        counts = ((found.operator_calls, 7), (found.launches, 9))
        return (
            f"{name:36}{spread([1e3 * seconds for seconds in variant.medians()]):>28}"
            f"{statistics.median(self.rates(name)):10.0f}{flops / 1e12:9.3g}"
            + (f"{flops / self.peak:7.1%}" if self.peak else f"{'–':>7}")
            + "".join(f"{1e3 * statistics.median(variant.medians(part)):10.1f}" for part in PARTS)
            + f"{found.peak_bytes / 1e6:9.0f}"
            + "".join(f"{'–' if number is None else number:>{width}}" for number, width in counts)
        )

    def results(self) -> Iterator[Result]:
        """Times hold one value for each round, in their order. Operator calls on a CPU are not among them: they are
        the references', and ``trimegatron bench operators`` counts the kernels'."""
        for name, variant in self.variants.items():
            found = self.counts[name]
            yield self._result(name, "time", "s", variant.medians())
            yield self._result(name, "speed", "tokens/s", self.rates(name), better="higher")
            yield self._result(name, "time of the first step", "s", [variant.first_step])
            for part in PARTS:
                yield self._result(name, f"time of {part}", "s", variant.medians(part))
            if self.peak:
                shares = [rate * self.flops_per_token / self.peak for rate in self.rates(name)]
                yield self._result(name, "MFU", "", shares, better="higher")
            yield self._result(name, "peak memory", "bytes", [found.peak_bytes])
            if found.operator_calls is not None and found.launches is not None:
                yield self._result(name, "operator calls", "", [found.operator_calls], measured=False)
            if found.launches is not None:
                yield self._result(name, "launches", "", [found.launches], measured=False)

    def _result(
        self,
        variant: str,
        figure: str,
        unit: str,
        values: Sequence[float],
        *,
        better: str = "lower",
        measured: bool = True,
    ) -> Result:
        return Result(
            "training step", variant, figure, unit, list(values), better, None, self.parameters, measured, self.name
        )


def count(contender: Contender, device: torch.device) -> Counts:
    """Memory on a GPU was measured in the turns."""
    variant = contender.variant
    calls = None if variant.is_compiled else count_phases(variant.forward, variant.update)
    if device.type == "cuda":
        launches, peak = read(record(variant.step, device), "cuda").launches, contender.peak
    else:
        launches, peak = None, peak_bytes_on_cpu(variant)
    return Counts(peak, None if calls is None else sum(sum(phase.values()) for phase in calls.values()), launches)
