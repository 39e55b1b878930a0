"""`trl-atropos report RUN_DIR`: one HTML file that shows a run, without a network, a server or a
library.

`run_folder.py` reads the log and the rollouts. This module chooses what the page shows of them, and
puts it as gzipped JSON into `page.html`, beside `page.css` and the scripts, which unpack and draw
it. The tokens of rollouts are in chunks of their own, which the page unpacks when somebody opens
one.
"""

import argparse
import base64
import gzip
import html
import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.report.run_folder import (
    Fate,
    Run,
    advantages,
    read_run,
    rollouts_of,
    series,
    trainer_logprobs,
)
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.spool import read_rollouts

HERE = Path(__file__).parent
SCRIPTS = ("page_charts.js", "page_list.js", "page_tokens.js", "page_rollouts.js", "page.js")
POINTS = 2000  # of a curve
MAX_ROLLOUTS = 2000
MAX_TOKENS = 1_500_000  # of the rollouts in the page, about 6 bytes each
CHUNK_TOKENS = 50_000  # of the rollouts that are unpacked together
NATS = 1000  # log-probabilities, gaps and advantages are written in thousandths
OF_RUN = (
    "source",
    "began_at",
    "last_at",
    "ended",
    "resumed",
    "steps",
    "books",
    "warnings",
    "config",
    "evaluations",
)

DESCRIPTION = """\
Writes one HTML file about a run: opens in any browser of today, needs no
network, and can be sent to somebody else. It has the reward, the evaluations,
curves of everything else that was logged, the warnings, the settings, and
rollouts to search, filter and sort, with every token coloured by advantage,
log-probability or trainer-sampler gap.

Works while the run goes on, and changes nothing of it."""


def main(argv: list[str]) -> None:
    """Writes the page and says where it is. Exits with 1 if no page can be made."""
    options = build_parser().parse_args(argv)
    output = options.output or options.run_dir / "report.html"
    try:
        page, summary = build(options.run_dir, options.max_rollouts)
        output.write_text(page, encoding="utf-8")
    except AtroposTrainingError as error:
        sys.exit(f"trl-atropos report: {error}")
    except OSError as error:
        sys.exit(
            f"trl-atropos report: {output} cannot be written ({error.strerror}). Name another with "
            "--output."
        )
    sys.stdout.write(
        f"{summary}\n{output} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser.\n"
    )


def build_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "trl-atropos report", description=DESCRIPTION, formatter_class=formatter
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="`output_dir` of the run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    limits = f"default: %(default)s, and at most {MAX_TOKENS:,} tokens"
    text = (
        f"rollouts to show in full, whole groups from all over the run ({limits}); curves are "
        "always of all"
    )
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS, metavar="N", help=text)
    return parser


def build(folder: Path, max_rollouts: int = MAX_ROLLOUTS) -> tuple[str, str]:
    """The page of the run in `folder`, and one line about what is in it. Raises `ReportError` if
    there is no run."""
    data, chunks = _collect(read_run(folder), max_rollouts)
    blocks = [
        _block("data", data),
        *(_block(f"chunk-{i}", chunk) for i, chunk in enumerate(chunks)),
    ]
    parts = {
        "TITLE": html.escape(f"{data['name']} · trl_atropos report"),
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "DATA": "\n".join(blocks),
        "SCRIPT": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    # in one pass: a title may have braces
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], template)
    shown = f"{len(data['rollouts']['index'])} of {data['total_rollouts']} rollouts"
    return page, f"{data['steps']} steps, {len(data['warnings'])} warnings, {shown}."


def _collect(run: Run, max_rollouts: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the page shows, and the chunks with the tokens of its rollouts."""
    rollouts, unreadable = rollouts_of(run)
    rollouts["advantage"] = advantages(rollouts, run.config.get("scale_rewards"))
    packed = pack(
        rollouts.iloc[select(rollouts, max_rollouts, MAX_TOKENS)], run.folder / "rollouts"
    )
    texts, unreadable_tokenizer = token_texts(run.folder / "tokenizer.json", packed.token_ids)
    data = {
        "name": run.folder.resolve().name,
        "made_at": time.time(),
        **({"changed": [], "model": {}, "versions": {}, "devices": None, "ends": []} | run.began),
        **{name: getattr(run, name) for name in OF_RUN},
        "metrics": series(run, POINTS),
        "rewards": rewards(rollouts, POINTS),
        "rollouts": packed.columns,
        "total_rollouts": len(rollouts),
        "no_gap": why_no_gap(run, rollouts) if pd.isna(packed.columns["gap"]).all() else None,
        "unreadable": [*unreadable, *packed.unreadable, *unreadable_tokenizer],
        "texts": texts or {},
        "has_tokenizer": texts is not None,
    }
    return data, packed.chunks


def _block(name: str, content: Any) -> str:
    """JSON that the page unpacks. Base64 has no character that could end the element."""
    # browsers know no NaN
    finite = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'


# ----------------------------------------------------------------------------- rewards and rollouts


def rewards(rollouts: pd.DataFrame, limit: int) -> list[dict[str, Any]]:
    """The mean score of each environment's rollouts by the step that took them, over at most
    `limit` joined steps."""
    known = rollouts[rollouts["first_step"] > 0]
    size = -(-max(known["first_step"], default=1) // limit)
    last_steps = -(-known["first_step"] // size) * size  # of each point
    found = []
    for environment, its in known.groupby("environment"):
        means = its["score"].groupby(last_steps[its.index]).mean().round(6)
        found.append(
            {"environment": environment, "steps": means.index.tolist(), "means": means.tolist()}
        )
    return found


def select(rollouts: pd.DataFrame, max_rollouts: int, max_tokens: int) -> np.ndarray:
    """Places of whole groups, evenly spread over the run, first and last included, within both
    limits."""
    group, names = rollouts["group"].factorize()  # numbered as they arrived
    lengths = rollouts["prompt_tokens"] + rollouts["completion_tokens"]
    sizes = np.bincount(group)
    tokens = np.bincount(group, lengths)
    count = len(names) if max_rollouts > 0 else 0
    while count:
        chosen = np.unique(np.linspace(0, len(names) - 1, count).round().astype(int))
        over = max(sizes[chosen].sum() / max_rollouts, tokens[chosen].sum() / max_tokens)
        if over <= 1 or count == 1:
            return np.flatnonzero(np.isin(group, chosen))
        count = max(1, min(count - 1, int(count / over)))
    return np.empty(0, np.int64)


@dataclass
class Packed:
    """Rollouts as the page reads them."""

    columns: dict[str, list]  # one value per rollout
    unreadable: list[str]
    # {"prompts": [ids ...], "rows": [[...] ...]}
    chunks: list[dict[str, Any]] = field(default_factory=list)
    token_ids: set[int] = field(default_factory=set)  # every id that occurs


SHOWN = [
    "index",
    "group",
    "environment",
    "policy_version",
    "newest_version",
    "score",
    "group_mean",
    "group_std",
]
SHOWN += [
    "prompt_tokens",
    "completion_tokens",
    "fate",
    "first_step",
    "last_step",
    "stale",
    "advantage",
]
FLAGS = ["zero_advantage", "raw_advantage", "sft"]


def pack(chosen: pd.DataFrame, folder: Path) -> Packed:
    """
    The chosen rollouts, with their trainer-sampler gap: the trainer's minus the sampler's
    log-probabilities.

    Of a chunk's "rows", each is `[number of its prompt, completion ids, lengths of its trained and
    masked stretches in turn, log-probabilities, token-level advantages or null, messages or null,
    gaps or null]`; it begins with a trained stretch, and null stands for an unknown log-probability
    or gap.
    """
    # What is kept of the others is of a life of the run that was given up.
    trained = chosen[~chosen["fate"].isin((Fate.WAITING, Fate.PASSED_OVER))]
    scored, unreadable = trainer_logprobs(folder, set(trained["index"]))
    packed = Packed(
        chosen[SHOWN].to_dict("list") | chosen[FLAGS].astype(int).to_dict("list"), unreadable
    )
    packed.columns |= {
        name: [] for name in ("logprob", "trained_tokens", "gap", "gap_max", "last_token", "place")
    }
    filled = CHUNK_TOKENS
    wanted = set(chosen["index"])
    read = (rollout for path in chosen["path"].unique() for rollout in read_rollouts(Path(path)))
    for place, rollout in enumerate(rollout for rollout in read if rollout.index in wanted):
        if filled >= CHUNK_TOKENS:
            packed.chunks.append({"prompts": [], "rows": []})
            filled = 0
        chunk = packed.chunks[-1]
        prompt = rollout.prompt_ids.tolist()
        completion = rollout.completion_ids.tolist()
        if prompt not in chunk["prompts"]:
            chunk["prompts"].append(prompt)
            filled += len(prompt)
        filled += len(completion)
        packed.token_ids.update(prompt, completion)
        own = rollout.token_advantages if rollout.trains_on_token_advantages else None
        if own is not None:
            packed.columns["advantage"][place] = float(own[rollout.mask].mean())
        known = rollout.logprobs[rollout.mask & ~np.isnan(rollout.logprobs)]
        packed.columns["logprob"].append(float(known.mean()) if len(known) else np.nan)
        packed.columns["trained_tokens"].append(int(rollout.mask.sum()))
        gap = _gap(scored.get(rollout.index), rollout)
        packed.columns["gap"].append(np.nan if gap is None else float(np.nanmean(np.abs(gap))))
        packed.columns["gap_max"].append(np.nan if gap is None else float(np.nanmax(np.abs(gap))))
        packed.columns["last_token"].append(completion[-1])
        packed.columns["place"].append([len(packed.chunks) - 1, len(chunk["rows"])])
        # where one begins
        turns = np.diff(rollout.mask, prepend=~rollout.mask[:1], append=~rollout.mask[-1:])
        row = [chunk["prompts"].index(prompt), completion, np.diff(np.flatnonzero(turns)).tolist()]
        row += [
            _thousandths(rollout.logprobs),
            _thousandths(own),
            rollout.messages,
            _thousandths(gap),
        ]
        chunk["rows"].append(row)
    return packed


def _gap(scored: np.ndarray | None, rollout: Rollout) -> np.ndarray | None:
    """`(c,)` in nats, NaN where one of the two log-probabilities is not known; None if none is."""
    if scored is None or len(scored) != len(rollout.logprobs):
        return None
    gap = scored - rollout.logprobs
    # a policy that has diverged has infinite ones
    gap = np.where(np.isfinite(gap), gap, np.float32(np.nan))
    return gap if not np.isnan(gap).all() else None


def _thousandths(values: np.ndarray | None) -> list[int | None] | None:
    return (
        values
        if values is None
        else [None if np.isnan(one) else round(float(one) * NATS) for one in values]
    )


def why_no_gap(run: Run, rollouts: pd.DataFrame) -> str:
    """What a page without any trainer-sampler gap says in its place."""
    if not len(rollouts):
        return "there is no rollout in this run's folder"
    if any(run.folder.glob("rollouts/trainer-[0-9]*.feather")):
        return (
            "none of these rollouts is known to have been trained, or its sampler's "
            "log-probabilities are not known"
        )
    if run.config.get("vllm_importance_sampling_correction") is False:
        return "they are not computed with `vllm_importance_sampling_correction: false`"
    missing = "the trainer's log-probabilities are not in this run's folder"
    return (
        f"{missing}: no batch has been trained yet, or they could not be written (then the "
        "warnings say so)"
    )


# ------------------------------------------------------------------------------- the text of tokens

REPLACEMENT = "�"  # what a decoder makes of bytes that are no character
SPACE = "▁"  # of SentencePiece


def token_texts(path: Path, ids: Iterable[int]) -> tuple[dict[int, str] | None, list[str]]:
    """Returns the text of every id that the tokenizer at `path` knows, `None` without a tokenizer
    that can be read. And the file with the reason, if it is there and cannot be read."""
    if not path.is_file():
        return None, []
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower type for what it cannot parse
        return None, [f"{path.name}: {error}"]
    alphabet = _byte_alphabet()
    found = {}
    pieces = {
        number: piece for number in ids if (piece := tokenizer.id_to_token(number)) is not None
    }
    for number, piece in pieces.items():
        text = tokenizer.decode([number], skip_special_tokens=False)
        if SPACE in piece:
            text = piece.replace(SPACE, " ")  # a decoder would strip the first one
        elif REPLACEMENT in text and all(character in alphabet for character in piece):
            text = "".join(f"<0x{alphabet[character]:02X}>" for character in piece)
        found[number] = text or piece
    return found, []


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for: GPT-2's `bytes_to_unicode`
    in reverse."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
