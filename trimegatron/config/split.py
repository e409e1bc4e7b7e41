"""``--split 969,30,1``: the proportions of training, validation and test documents."""

from __future__ import annotations

from trimegatron.config.options import fail


def parse_split(text: str, compat: int = 2026) -> tuple[float, float, float]:
    """The three proportions as given, not normalized; those left out are 0.

    ``compat`` 2022: as Megatron-LM then, only the first three numbers count.

    Separated by commas or slashes. Unlike Megatron-LM, which picks every run of digits and dots out of the text
    ("-1,1,0" becomes 1, 1, 0), anything that is not a number at least 0 is refused.

    Raises:
        ConfigError: naming the option, for wrong numbers, more than three, or a sum of 0.
    """
    way_out = "Write for example 969,30,1."
    parts = text.replace("/", ",").split(",")
    if compat == 2022:
        parts = parts[:3]
    if len(parts) > 3:
        fail("split", text, "must have at most three numbers: training, validation, test", f"got {len(parts)}", way_out)
    numbers = []
    for part in parts:
        try:
            number = float(part)
        except ValueError:
            fail("split", text, "must be numbers with commas between them", f"{part.strip()!r} is not one", way_out)
        if not 0 <= number < float("inf"):
            fail("split", text, "must be proportions of at least 0", f"got {part.strip()}", way_out)
        numbers.append(number)
    if not sum(numbers) > 0:
        fail("split", text, "must have a sum above 0", way_out=way_out)
    train, valid, test = numbers + [0.0] * (3 - len(numbers))
    return train, valid, test
