"""The text of token ids, from the `tokenizer.json` in a run's folder, for `page.py`.

Each id is turned into text by itself, because the page shows a colour for each. Bytes that are no character by
themselves are shown as `<0xE2>`.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

REPLACEMENT = "�"  # what a decoder makes of bytes that are no character
SPACE = "▁"  # of SentencePiece


def find_tokenizer(folder: Path) -> Path | None:
    """The run's own, or else that of its newest checkpoint."""
    saved = list(folder.glob("checkpoint-*/tokenizer.json"))
    return next((path for path in [folder / "tokenizer.json", *_newest_first(saved)] if path.is_file()), None)


def _newest_first(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def texts(path: Path, ids: Iterable[int]) -> dict[int, str]:
    """The text of every id that the tokenizer at `path` knows."""
    tokenizer = Tokenizer.from_file(str(path))
    alphabet = _byte_alphabet()
    return {
        number: _text(tokenizer, number, piece, alphabet)
        for number in ids
        if (piece := tokenizer.id_to_token(number)) is not None
    }


def _text(tokenizer: Tokenizer, number: int, piece: str, alphabet: dict[str, int]) -> str:
    if SPACE in piece:
        return piece.replace(SPACE, " ")  # a decoder would strip the first one
    text = tokenizer.decode([number], skip_special_tokens=False)
    if REPLACEMENT in text and all(character in alphabet for character in piece):
        return "".join(f"<0x{alphabet[character]:02X}>" for character in piece)
    return text or piece


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`, the other way)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
