"""Runs `trl-atropos sessions`: lists the sessions of inference servers, shows what one has kept,
and ends one."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from trl_atropos.errors import AtroposTrainingError, ServerError
from trl_atropos.protocol import (
    TOKEN_VARIABLE,
    SessionCall,
    SessionReply,
    SessionSegment,
    SessionSummary,
)
from trl_atropos.session_client import SessionClient
from trl_atropos.terminal import CommandParser, fitted

ACTIONS = ("list", "show", "end")
URL = "http://127.0.0.1:9001"
SHOWN_OF_ID = 8  # characters: the whole id is a key
COLUMNS = "{:<10} {:>8} {:>8} {:>6} {:>9} {:>9}  {}"


def sessions_parser() -> argparse.ArgumentParser:
    """Returns the parser of `trl-atropos sessions`."""
    parser = CommandParser(
        prog="trl-atropos sessions",
        description="List the sessions of inference servers, show the tree of tokens that one has "
        "kept, or end one, which aborts its calls.",
        epilog=f"The servers ask for the token in {TOKEN_VARIABLE}, which `trl-atropos serve` "
        "keeps in a file if you set none: see the last lines of its start.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=ACTIONS, nargs="?", default="list")
    parser.add_argument(
        "id", nargs="?", default="", help="of `show` and `end`: the session's id, or its beginning"
    )
    parser.add_argument(
        "--url",
        action="append",
        help=f"of a server; may be given several times (default: {URL})",
    )
    return parser


def sessions(words: list[str]) -> None:
    """Prints what the words ask for. Exits with 1 if a server does not answer."""
    parser = sessions_parser()
    # so that the id may stand behind `--url`
    options = parser.parse_intermixed_args(words)
    if options.action != "list" and not options.id:
        parser.error(f"name a session: `trl-atropos sessions {options.action} ID`")
    try:
        client = SessionClient(options.url or [URL])
        text = asyncio.run(_text_of(client, options.action, options.id))
    except AtroposTrainingError as problem:
        sys.exit(fitted(f"trl-atropos sessions: {problem}"))
    sys.stdout.write(text)


async def _text_of(client: SessionClient, action: str, beginning: str) -> str:
    """Returns what the command prints."""
    replies = await client.list()
    summaries = []
    for url, reply in replies.items():
        for summary in reply.sessions:
            summaries.append((url, summary))
    if action == "list":
        return _table(summaries)
    url, session_id = _named(summaries, beginning)
    if action == "show":
        return _tree(await client.read(url, session_id))
    reply = await client.end(url, session_id)
    counts = reply.counts
    return (
        f"Ended {session_id[:SHOWN_OF_ID]}: {counts['calls']} calls, {counts['tokens']} sampled "
        "tokens.\n"
    )


def _named(summaries: Sequence[tuple[str, SessionSummary]], beginning: str) -> tuple[str, str]:
    """Returns URL and id of the one session whose id begins so. Raises `ServerError` if there is
    none, or if there are several."""
    matching = []
    for url, summary in summaries:
        if summary.id.startswith(beginning):
            matching.append((url, summary.id))
    if len(matching) == 1:
        return matching[0]
    raise ServerError(
        f"{len(matching)} sessions have an id that begins with {beginning!r}",
        fix="`trl-atropos sessions list` shows them; write more of the id.",
        code="session-id",
    )


def _table(summaries: Sequence[tuple[str, SessionSummary]]) -> str:
    """Returns one line for each session, and a heading."""
    if not summaries:
        return "No sessions.\n"
    lines = [COLUMNS.format("id", "age", "silent", "calls", "sampled", "in flight", "")]
    for url, session in summaries:
        line = COLUMNS.format(
            session.id[:SHOWN_OF_ID],
            f"{session.age:.0f} s",
            f"{session.silence:.0f} s",
            session.calls,
            session.tokens,
            session.in_flight,
            f"{session.ended or 'open'} at {url}",
        )
        lines.append(line)
    return "\n".join(lines) + "\n"


def _tree(reply: SessionReply) -> str:
    """Returns one line for each segment, indented below its parent, and the counts."""
    call_of = {call.segment: call for call in reply.calls}
    depths: list[int] = []
    lines_below: dict[int, list[int]] = {-1: []}
    for number, segment in enumerate(reply.segments):
        depth = 0
        if segment.parent >= 0:
            depth = depths[segment.parent] + 1
        depths.append(depth)
        lines_below[number] = []
        lines_below[segment.parent].append(number)
    lines = []
    pending = lines_below[-1][::-1]
    while pending:
        number = pending.pop()
        line = _line_of(number, reply.segments[number], call_of[number])
        lines.append("  " * depths[number] + line)
        pending += lines_below[number][::-1]
    counts = [f"{name} {count}" for name, count in reply.counts.items()]
    lines.append(f"{reply.ended or 'open'}: {', '.join(counts)}")
    return "\n".join(lines) + "\n"


def _line_of(number: int, segment: SessionSegment, call: SessionCall) -> str:
    """Returns, for instance, "3: at 120, sees 14, samples 32 (version 7), stop"."""
    ((start, end),) = segment.sampled
    first, _, _ = segment.versions[0]
    last, _, _ = segment.versions[-1]
    shown = str(first)
    if last != first:
        shown = f"{first}-{last}"
    reason = "" if call.reason is None else f", not to be recomputed: {call.reason}"
    return (
        f"{number}: at {segment.at}, sees {start}, samples {end - start} (version {shown}), "
        f"{call.finish}{reason}"
    )
