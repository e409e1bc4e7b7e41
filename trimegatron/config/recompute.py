"""The options of recomputation: what backward computes again instead of keeping it."""

from __future__ import annotations

from dataclasses import dataclass

from trimegatron.config.options import Options, fail, option


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Options):
    """Recomputation"""

    recompute_activations: bool = option(False, "the same as --recompute-granularity selective")
    recompute_granularity: str | None = option(
        None,
        "what backward computes again instead of keeping it; full: whole layers, selective: the attention core",
        derived="nothing",
        choices=("full", "selective"),
    )
    recompute_method: str | None = option(
        None,
        "of full; uniform: all layers, in runs of --recompute-num-layers; block: the first so many of each stage",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = option(1, "of full; see --recompute-method", unit="layers", minimum=1)
    recompute_modules: list[str] | None = option(
        None, "of selective", derived="core_attn", choices=("core_attn",), nargs="*"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                fail(
                    "recompute_activations",
                    None,
                    "and --recompute-granularity full exclude each other",
                    way_out="The first means selective. Give one of the two.",
                )
            self._derive(recompute_granularity="selective")
        if self.recompute_granularity == "full" and self.recompute_method is None:
            fail(
                "recompute_method",
                None,
                "is required with --recompute-granularity full",
                way_out="uniform replays all layers, block the first --recompute-num-layers of each stage.",
            )
        if self.recompute_granularity != "full" and self.recompute_method is not None:
            fail(
                "recompute_method",
                self.recompute_method,
                "needs --recompute-granularity full",
                f"the granularity is {self.recompute_granularity or 'not given'}",
                "Add it, or leave the method out.",
            )
