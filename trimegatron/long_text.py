"""A text too long to be held as one Python string, whose every character may take four bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

PIECE = 1 << 20  # bytes of JSON decoded at a time

# A blank after a visible ASCII character that is no part of an escape: between them GPT-2's rule always cuts.
_CUT = re.compile(rb"(?<=[^\\]{6}[!#-\[\]-~]) ")


class LongText:
    """The text of a JSON string, decoded a piece at a time.

    The tokens of the pieces together are the tokens of the text, by GPT-2's rule for words and no other
    (``byte_level.split_long`` says why).

    Args:
        raw: JSON in UTF-8.
        start, stop: of the string in it, without the quotation marks.

    Raises:
        ValueError: it is no JSON string, no UTF-8, or holds half a character.
    """

    def __init__(self, raw: bytes, start: int, stop: int) -> None:
        self.raw, self.start, self.stop = raw, start, stop
        self.num_bytes = sum(len(piece.encode()) for piece in self)  # of UTF-8

    def __iter__(self) -> Iterator[str]:
        at = self.start
        while self.stop - at > PIECE and (cut := _CUT.search(self.raw, at + PIECE, self.stop)):
            yield self._decode(at, cut.start())
            at = cut.start()
        yield self._decode(at, self.stop)

    def _decode(self, start: int, stop: int) -> str:
        return json.loads(b'"%b"' % self.raw[start:stop])
