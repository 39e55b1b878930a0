"""`trl-atropos report RUN_DIR`: one HTML file that shows a run, without a network, a server or a library.

`run_folder.py` reads the log and the rollouts, `page_data.py` chooses what is shown of them. That goes as
gzipped JSON into `page.html`, beside `page.css` and the scripts, which unpack and draw it.
"""

import argparse
import base64
import gzip
import html
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.report import page_data
from trl_atropos.report.page_data import TrainerLogprobs, why_none
from trl_atropos.report.run_folder import Rows, Run, advantages, read_all, read_run, series, trace

HERE = Path(__file__).parent
SCRIPTS = ("page_charts.js", "page_list.js", "page_tokens.js", "page_rollouts.js", "page.js")
POINTS = 2000  # of a curve
MAX_ROLLOUTS = 2000
MAX_TOKENS = 1_500_000  # of the rollouts in the page, about 6 bytes each
ATTEMPTS = 3  # a run may remove its oldest rollouts while they are read

DESCRIPTION = """\
Writes one HTML file about a run: opens in any browser of today, needs no network, and can be sent to somebody else.

  curves     reward with its spread for every environment, lengths, staleness, the gap between trainer and sampler,
             publish times, where the time went, and every other metric that was logged
  warnings   in the order in which they were given, with what to do
  rollouts   by step, group, environment, reward and gap; every token coloured by advantage, by the sampler's
             log-probability or by the gap between trainer and sampler, masked tokens grey, turns apart, and which
             step a rollout was trained at
  settings   those that differ from the default, and all others

Works while the run goes on: it reads what is there (run_log.jsonl, or the newest checkpoint's trainer_state.json, and
rollouts/) and changes nothing. Run it again for a newer page."""

EPILOG = """\
examples:
  trl-atropos report runs/quickstart
  trl-atropos report runs/mine --output /tmp/mine.html --max_rollouts 500"""


def main(argv: list[str]) -> None:
    """Writes the page and says where it is. Exits with 1 if no page can be made."""
    options = build_parser().parse_args(argv)
    output = options.output or options.run_dir / "report.html"
    try:
        page, told = build(options.run_dir, options.max_rollouts)
        write(output, page)
    except AtroposTrainingError as error:
        sys.exit(f"trl-atropos report: {error}")
    except OSError as error:
        sys.exit(f"trl-atropos report: {output} cannot be written ({error.strerror}). Name another with --output.")
    sys.stdout.write(f"{told}\n{output} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser.\n")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos report",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="`output_dir` of the run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    parser.add_argument(
        "--max_rollouts",
        type=_count,
        default=MAX_ROLLOUTS,
        metavar="N",
        help=f"rollouts to show in full, whole groups from all over the run (default: %(default)s, and at most "
        f"{MAX_TOKENS:,} tokens); curves are always of all",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def build(folder: Path, max_rollouts: int = MAX_ROLLOUTS) -> tuple[str, str]:
    """
    The page of the run in `folder`, and one line about what is in it.

    Raises:
        ReportError: there is no run.
    """
    for attempt in range(ATTEMPTS):
        try:
            run, rows = read_run(folder), read_all(folder / "rollouts")
            trace(rows, run)
            data, packed = _collect(run, rows, max_rollouts)
            break
        except FileNotFoundError:
            if attempt + 1 == ATTEMPTS:
                raise
    blocks = [_block("data", data), *(_block(f"chunk-{i}", chunk) for i, chunk in enumerate(packed.chunks))]
    parts = {
        "TITLE": html.escape(f"{data['name']} · trl_atropos report"),
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "DATA": "\n".join(blocks),
        "SCRIPT": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], template)  # in one pass: a title may have braces
    shown = len(packed.columns["index"])
    return page, f"{run.steps} steps, {len(run.warnings)} warnings, {shown} of {len(rows)} rollouts."


def _collect(run: Run, rows: Rows, max_rollouts: int) -> tuple[dict[str, Any], page_data.Packed]:
    chosen = page_data.select(rows, max_rollouts, MAX_TOKENS)
    trainer = TrainerLogprobs(run.folder / "rollouts")
    packed = page_data.pack(rows, chosen, advantages(rows, run.config.get("scale_rewards")), trainer)
    has_gap = not all(map(math.isnan, packed.columns["gap"]))
    tokenizer = find_tokenizer(run.folder)
    shown = token_texts(tokenizer, packed.token_ids.tolist()) if tokenizer is not None else {}
    data = {
        "name": run.folder.resolve().name,
        "made_at": time.time(),
        "source": run.source,
        "began_at": run.began_at,
        "last_at": run.last_at,
        "ended": run.ended,
        "resumed": run.resumed,
        "steps": run.steps,
        "max_steps": run.began.get("max_steps"),
        "books": run.books,
        "metrics": series(run, POINTS),
        "rewards": page_data.rewards(rows, POINTS),
        "warnings": [{name: warning.get(name) for name in ("at", "step", "warning")} for warning in run.warnings],
        "config": run.config,
        "changed": run.began.get("changed", []),
        "model": run.began.get("model", {}),
        "versions": run.began.get("versions", {}),
        "rollouts": packed.columns,
        "total_rollouts": len(rows),
        "no_gap": None if has_gap else why_none(run, rows, trainer),
        "unreadable": [*rows.unreadable, *trainer.unreadable],
        "texts": shown,
        "has_tokenizer": tokenizer is not None,
    }
    return data, packed


def _block(name: str, content: Any) -> str:
    """JSON that the page unpacks. Base64 has no character that could end the element."""
    text = json.dumps(_finite(content), separators=(",", ":"), default=str)
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _finite(content: Any) -> Any:
    """Browsers know no NaN in JSON."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def write(path: Path, page: str) -> None:
    """Whole or not at all: somebody may have the last one open."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(page, encoding="utf-8")
    os.replace(draft, path)


# -------------------------------------------------------------------------------------------------- the text of tokens

REPLACEMENT = "�"  # what a decoder makes of bytes that are no character
SPACE = "▁"  # of SentencePiece


def find_tokenizer(folder: Path) -> Path | None:
    """The run's own, or else that of its newest checkpoint."""
    saved = list(folder.glob("checkpoint-*/tokenizer.json"))
    return next((path for path in [folder / "tokenizer.json", *_newest_first(saved)] if path.is_file()), None)


def _newest_first(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def token_texts(path: Path, ids: Iterable[int]) -> dict[int, str]:
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
