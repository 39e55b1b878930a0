"""Writes one HTML file that shows a run, without a network, a server or a library:
`trl-atropos report RUN_DIR`.

`run_folder.py` reads the log and the rollouts. This module selects some of them, and puts them as
gzipped JSON into `page.html`, beside `page.css` and the scripts, which unpack and draw them. The
tokens of rollouts are in chunks of their own, which the page unpacks when you open one.
"""

import argparse
import base64
import gzip
import html
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from trl_atropos.activity import activity
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.report.run_folder import (
    Fate,
    Run,
    advantages,
    episode_counts,
    read_run,
    rollouts_of,
    series,
    session_counts,
    trainer_logprobs,
)
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.spool import read_rollouts
from trl_atropos.terminal import CommandParser, fitted

HERE = Path(__file__).parent
SCRIPTS = ("page_charts.js", "page_list.js", "page_tokens.js", "page_rollouts.js", "page.js")
POINTS = 2000  # of a curve
MAX_ROLLOUTS = 2000
MAX_TOKENS = 1_500_000  # of the rollouts in the page, about 6 bytes each
CHUNK_TOKENS = 50_000  # of the rollouts that are unpacked together
NATS = 1000  # log-probabilities, gaps and advantages are written in thousandths
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
        with activity(f"Making the page of {options.run_dir}"):
            page, summary = build(options.run_dir, options.max_rollouts)
        output.write_text(page, encoding="utf-8")
    except AtroposTrainingError as error:
        sys.exit(fitted(f"trl-atropos report: {error}"))
    except OSError as error:
        message = f"trl-atropos report: {output} cannot be written ({error.strerror})."
        sys.exit(fitted(f"{message} Name another with --output."))
    megabytes = len(page.encode()) / 1e6
    message = f"{summary}\n{output} ({megabytes:.1f} MB): open it in a browser.\n"
    sys.stdout.write(fitted(message, sys.stdout))


def build_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = CommandParser("trl-atropos report", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="`output_dir` of the run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    text = (
        "rollouts to show in full, whole groups from all over the run (default: %(default)s, and "
        f"at most {MAX_TOKENS:,} tokens); curves are always of all"
    )
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS, metavar="N", help=text)
    return parser


def build(folder: Path, max_rollouts: int = MAX_ROLLOUTS) -> tuple[str, str]:
    """Returns the page of the run in `folder`, and one line about its content. Raises `ReportError`
    if there is no run."""
    run = read_run(folder)
    data, chunks = _collect(run, max_rollouts)
    blocks = [_block("data", data)]
    for number, chunk in enumerate(chunks):
        blocks.append(_block(f"chunk-{number}", chunk))
    scripts = [_file(name) for name in SCRIPTS]
    parts = {
        "TITLE": html.escape(f"{data['name']} · trl_atropos report"),
        "STYLE": _file("page.css"),
        "DATA": "\n".join(blocks),
        "SCRIPT": "\n".join(scripts),
    }
    template = _file("page.html")
    # in one pass: a title may have braces
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], template)
    shown = len(data["rollouts"]["index"])
    warnings = len(data["warnings"])
    rollouts = f"{shown} of {data['total_rollouts']} rollouts"
    return page, f"{data['steps']} steps, {warnings} warnings, {rollouts}."


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _collect(run: Run, max_rollouts: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the data of the page, and the chunks with the tokens of its rollouts."""
    rollouts, unreadable = rollouts_of(run)
    rollouts["advantage"] = advantages(rollouts, run.config.get("scale_rewards"))
    places = select(rollouts, max_rollouts, MAX_TOKENS)
    packed = pack(rollouts.iloc[places], run.folder / "rollouts")
    texts, unreadable_tokenizer = token_texts(run.folder / "tokenizer.json", packed.token_ids)
    # A run of which we have no log has none of these.
    began = {"changed": [], "model": {}, "versions": {}, "devices": None, "ends": []} | run.began
    has_gap = not pd.isna(packed.columns["gap"]).all()
    data = {
        "name": run.folder.resolve().name,
        "made_at": time.time(),
        **began,
        "source": run.source,
        "began_at": run.began_at,
        "last_at": run.last_at,
        "ended": run.ended,
        "resumed": run.resumed,
        "steps": run.steps,
        "books": run.books,
        "warnings": run.warnings,
        "config": run.config,
        "evaluations": run.evaluations,
        "metrics": series(run, POINTS),
        "sessions": session_counts(run),
        "episodes": episode_counts(run),
        "rewards": rewards(rollouts, POINTS),
        "rollouts": packed.columns,
        "total_rollouts": len(rollouts),
        "no_gap": None if has_gap else why_no_gap(run, rollouts),
        "unreadable": [*unreadable, *packed.unreadable, *unreadable_tokenizer],
        "texts": texts or {},
        "has_tokenizer": texts is not None,
    }
    return data, packed.chunks


def _block(name: str, content: Any) -> str:
    """Returns an element with JSON that the page unpacks. Base64 has no character that could end
    it."""
    # browsers know no NaN
    text = json.dumps(content, default=str)
    finite = json.loads(text, parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":"))
    compressed = gzip.compress(text.encode(), 6, mtime=0)
    encoded = base64.b64encode(compressed).decode()
    return f'<script type="text/plain" id="{name}">{encoded}</script>'


# ----------------------------------------------------------------------------- rewards and rollouts


def rewards(rollouts: pd.DataFrame, limit: int) -> list[dict[str, Any]]:
    """Returns the mean score of each environment's rollouts by the step that took them, over at
    most `limit` points of neighbouring steps."""
    trained = rollouts[rollouts["first_step"] > 0]
    steps = trained["first_step"]
    size = math.ceil(max(steps, default=1) / limit)  # steps of one point
    # With a size of 10, steps 1 to 10 are the point 10, steps 11 to 20 the point 20.
    last_steps = steps + -steps % size
    curves = []
    for environment, scores in trained["score"].groupby(trained["environment"]):
        by_point = scores.groupby(last_steps[scores.index])
        means = by_point.mean().round(6)
        curve = {
            "environment": environment,
            "steps": means.index.tolist(),
            "means": means.tolist(),
        }
        curves.append(curve)
    return curves


def select(rollouts: pd.DataFrame, max_rollouts: int, max_tokens: int) -> np.ndarray:
    """Returns the places of whole groups, evenly spread over the run, first and last included,
    within both limits. There is at least one group, unless `max_rollouts` is 0."""
    group, names = rollouts["group"].factorize()  # numbered as they arrived
    lengths = rollouts["prompt_tokens"] + rollouts["completion_tokens"]
    sizes = np.bincount(group)
    tokens = np.bincount(group, lengths)
    count = len(names) if max_rollouts > 0 else 0
    while count:
        spread = np.linspace(0, len(names) - 1, count)
        chosen = np.unique(spread.round().astype(int))
        too_many = sizes[chosen].sum() / max_rollouts
        too_long = tokens[chosen].sum() / max_tokens
        excess = max(too_many, too_long)
        if excess <= 1 or count == 1:
            is_chosen = np.isin(group, chosen)
            return np.flatnonzero(is_chosen)
        fewer = min(count - 1, int(count / excess))
        count = max(1, fewer)
    return np.empty(0, np.int64)


@dataclass
class Packed:
    """Holds rollouts as the page reads them."""

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
    "prompt_tokens",
    "completion_tokens",
    "fate",
    "first_step",
    "last_step",
    "stale",
    "advantage",
]
FLAGS = ["zero_advantage", "raw_advantage", "sft"]
COMPUTED = [
    "logprob",
    "trained_tokens",
    "gap",
    "gap_max",
    "last_tokens",
    "branches",
    "rewards",
    "place",
]


def pack(chosen: pd.DataFrame, folder: Path) -> Packed:
    """
    Returns the chosen rollouts, with their trainer-sampler gap: the trainer's minus the sampler's
    log-probabilities.

    Of a chunk's "rows", each is `[number of its prompt, completion ids, lengths of its trained and
    masked stretches in turn, log-probabilities, token-level advantages or null, messages or null,
    gaps or null, branches]`; null stands for an unknown log-probability or gap. A branch is `[its
    first completion token, its parent, how many tokens of the parent's path it shares]`, and the
    first part of the row is no branch.
    """
    # The trainer's log-probabilities of the others are from a part of the run that a resume undid.
    undone = chosen["fate"].isin((Fate.WAITING, Fate.PASSED_OVER))
    trained = chosen[~undone]
    scored, unreadable = trainer_logprobs(folder, set(trained["index"]))
    columns = chosen[SHOWN].to_dict("list")
    columns |= chosen[FLAGS].astype(int).to_dict("list")
    columns |= {name: [] for name in COMPUTED}
    packed = Packed(columns, unreadable)
    filled = CHUNK_TOKENS
    for place, rollout in enumerate(_read(chosen)):
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
        gap = _gap(scored.get(rollout.index), rollout)
        _fill_columns(columns, place, rollout, gap)
        number = len(packed.chunks) - 1
        columns["place"].append([number, len(chunk["rows"])])
        row = [
            chunk["prompts"].index(prompt),
            completion,
            _stretches(rollout),
            _thousandths(rollout.logprobs),
            _thousandths(_own_advantages(rollout)),
            rollout.messages,
            _thousandths(gap),
            _branches(rollout),
        ]
        chunk["rows"].append(row)
    return packed


def _read(chosen: pd.DataFrame) -> Iterator[Rollout]:
    indices = set(chosen["index"])
    for path in chosen["path"].unique():
        for rollout in read_rollouts(Path(path)):
            if rollout.index in indices:
                yield rollout


def _fill_columns(
    columns: dict[str, list], place: int, rollout: Rollout, gap: np.ndarray | None
) -> None:
    own_advantages = _own_advantages(rollout)
    if own_advantages is not None:
        trained_advantages = own_advantages[rollout.mask]
        columns["advantage"][place] = float(trained_advantages.mean())
    logprobs = rollout.logprobs[rollout.mask]
    logprobs = logprobs[~np.isnan(logprobs)]
    mean_logprob = np.nan
    if len(logprobs):
        mean_logprob = float(logprobs.mean())
    mean_gap = np.nan
    largest_gap = np.nan
    if gap is not None:
        sizes = np.abs(gap)
        mean_gap = float(np.nanmean(sizes))
        largest_gap = float(np.nanmax(sizes))
    columns["logprob"].append(mean_logprob)
    columns["trained_tokens"].append(int(rollout.mask.sum()))
    columns["gap"].append(mean_gap)
    columns["gap_max"].append(largest_gap)
    columns["last_tokens"].append(rollout.last_tokens.tolist())
    columns["branches"].append(len(_branches(rollout)))
    columns["rewards"].append(rollout.rewards)


def _own_advantages(rollout: Rollout) -> np.ndarray | None:
    """Returns `(c,)` advantages of single tokens, None if the rollout trains on one for all."""
    if not rollout.trains_on_token_advantages:
        return None
    return rollout.token_advantages


def _stretches(rollout: Rollout) -> list[int]:
    """Returns the lengths of trained and of masked stretches in turn: of the mask 1 1 0 0 1, they
    are 2, 2 and 1. No stretch goes on from one part of the row into the next: if a new part begins
    at the second token, they are 1, 0, 1, 2 and 1."""
    lengths: list[int] = []
    begin = 0
    for tokens in rollout.completion_parts:
        mask = rollout.mask[begin : begin + len(tokens)]
        begin += len(tokens)
        changes = np.flatnonzero(np.diff(mask)) + 1
        for stretch in np.split(mask, changes):
            if not len(stretch):
                continue
            is_turn_of_trained = len(lengths) % 2 == 0
            if stretch[0] != is_turn_of_trained:
                lengths.append(0)
            lengths.append(len(stretch))
    return lengths


def _branches(rollout: Rollout) -> list[list[int]]:
    if rollout.tree is None:
        return []
    tree = rollout.tree
    begins = tree.begins - len(rollout.prompt_ids)
    branches = np.stack([begins, tree.parents, tree.shared], axis=1)
    return branches[1:].tolist()


def _gap(scored: np.ndarray | None, rollout: Rollout) -> np.ndarray | None:
    """Returns `(c,)` in nats, NaN if one of the two log-probabilities is not known. None if none
    is known."""
    if scored is None or len(scored) != len(rollout.logprobs):
        return None
    gap = scored - rollout.logprobs
    is_known = np.isfinite(gap)  # a policy that has diverged has infinite ones
    if not is_known.any():
        return None
    return np.where(is_known, gap, np.float32(np.nan))


def _thousandths(values: np.ndarray | None) -> list[int | None] | None:
    if values is None:
        return None
    thousandths = []
    for value in values.tolist():
        is_known = not math.isnan(value)
        thousandths.append(round(value * NATS) if is_known else None)
    return thousandths


def why_no_gap(run: Run, rollouts: pd.DataFrame) -> str:
    """Returns the text of a page without any trainer-sampler gap, in its place."""
    if not len(rollouts):
        return "there is no rollout in this run's folder"
    if any(run.folder.glob("rollouts/trainer-[0-9]*.feather")):
        return (
            "none of these rollouts is known to have been trained, or its sampler's "
            "log-probabilities are not known"
        )
    if run.config.get("vllm_importance_sampling_correction") is False:
        return "they are not computed with `vllm_importance_sampling_correction: false`"
    return (
        "the trainer's log-probabilities are not in this run's folder: no batch has been trained "
        "yet, or they could not be written (then the warnings say so)"
    )


# ------------------------------------------------------------------------------- the text of tokens

REPLACEMENT = "�"  # in the place of bytes that are no character
SPACE = "▁"  # of SentencePiece


def token_texts(path: Path, ids: Iterable[int]) -> tuple[dict[int, str] | None, list[str]]:
    """Returns the text of every id that the tokenizer at `path` knows, and the file with the
    reason, if it cannot be read. Without a tokenizer that can be read, texts are `None`."""
    if not path.is_file():
        return None, []
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower type for what it cannot parse
        return None, [f"{path.name}: {error}"]
    alphabet = _byte_alphabet()
    texts = {}
    for number in ids:
        piece = tokenizer.id_to_token(number)
        if piece is None:
            continue
        text = tokenizer.decode([number], skip_special_tokens=False)
        if SPACE in piece:
            text = piece.replace(SPACE, " ")  # a decoder would strip the first one
        elif REPLACEMENT in text and alphabet.keys() >= set(piece):
            codes = [f"<0x{alphabet[character]:02X}>" for character in piece]
            text = "".join(codes)
        texts[number] = text or piece
    return texts, []


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary: GPT-2's `bytes_to_unicode` in
    reverse."""
    printable = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]
    bytes_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for number, byte in enumerate(others):
        bytes_of[chr(256 + number)] = byte
    return bytes_of
