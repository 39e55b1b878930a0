"""The wire contract between the trainer's side and the server's side: routes, the control token,
JSON bodies, and how both sides name a completion.

Both sides import this module; neither imports the other. Everything that crosses the wire is JSON,
checked by these models where it enters. The bodies stand in the order of a run: what the server is,
the weights it takes, the versions it sampled, the requests it refused.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from trl_atropos.errors import AtroposTrainingError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

PROTOCOL_VERSION = 10  # trainer and server must have the same
ROUTE_PREFIX = "/trl_atropos"  # of the control routes
TOKEN_VARIABLE = "TRL_ATROPOS_TOKEN"  # holds the token that the control routes require
# holds the token that opens, reads and ends sessions, and does nothing else, for environments
SESSION_TOKEN_VARIABLE = "TRL_ATROPOS_SESSION_TOKEN"

LEASE_BEGINNING = b"held\n"  # of the response that stays open while a trainer holds the server

NUMERICS = ("default", "float32_head", "float16", "bitwise")
# With `bitwise`, both sides tell FlashAttention that a query has at least that many tokens: with
# fewer, it divides the keys into other tiles.
LONGEST_QUERY = 128
ADAPTER_NAME = "policy"  # name of the trained adapter on the server, whatever its version
EVALUATION_KEY = "evaluation-"  # beginning of the API keys by which servers know evaluations
SESSION_PREFIX = "/s"  # of the routes of sessions: `/s/ID/v1/...`
# header of a `/generate` request whose sender reads no text, and its value. As in
# `environment_site/environment_sampling.py`, which runs where this package may not be installed.
ANSWER_HEADER = "x-trl-atropos-answer"
NUMBERS = "numbers"
# begins the names of sessions' counts in a run's log, each of which is since the entry before
SESSION_METRICS = "sessions/"


# ------------------------------------------------------------------------------ requests and errors


_kept_token = ""  # by `keep_token`


def keep_token(token: str) -> None:
    """Keeps the control token for `environment_token`, in this process alone. Every program that we
    start would inherit a variable, and show it to all processes of this user."""
    global _kept_token
    _kept_token = token


def hide_token() -> None:
    """Keeps the control token that the environment has, and takes it out of the environment."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if token:
        keep_token(token)


def environment_token() -> str:
    """Returns the control token in the environment, or else the one that is kept, or "". Raises
    `AtroposTrainingError` if no HTTP header can carry it."""
    token = os.environ.get(TOKEN_VARIABLE) or _kept_token
    for position, char in enumerate(token, start=1):
        if "!" <= char <= "~":
            continue
        kind = "a space or line break" if char.isspace() else "a control or non-ASCII character"
        what = (
            f"The control token in {TOKEN_VARIABLE} has {kind} at place {position} of "
            f"{len(token)}, which no HTTP header can carry"
        )
        fix = (
            "Set it to letters and digits (`openssl rand -hex 24`), the same for trainer and "
            "server."
        )
        raise AtroposTrainingError(what, kind, fix, "token")
    return token


def session_token(control_token: str) -> str:
    """Returns the token of `SESSION_TOKEN_VARIABLE`, from which nobody can compute the control
    token."""
    return hmac.new(control_token.encode(), b"sessions", hashlib.sha256).hexdigest()


def evaluation_key(authorization: str) -> str | None:
    """Returns the API key in an `Authorization` header if it is an evaluation's, else `None`."""
    key = authorization.removeprefix("Bearer ")
    if not key.startswith(EVALUATION_KEY):
        return None
    return key


def reason_in(text: str) -> str:
    """Returns the message in the body of an error response: `{"error": "..."}` is ours, vLLM's own
    routes answer `{"error": {"message": "..."}}`."""
    try:
        error = json.loads(text)["error"]
        if isinstance(error, dict):
            error = error["message"]
    except (ValueError, KeyError, TypeError):
        return text[:300]
    return str(error)


class Strict(BaseModel):
    """A JSON body in which a field that nobody knows is an error."""

    model_config = ConfigDict(extra="forbid")


# --------------------------------------------------------------------------------------- the server


class LoraInfo(Strict):
    """Bounds on the adapters that the server can serve."""

    max_rank: int
    max_loras: int  # in one batch
    dtype: str


class ServerInfo(Strict):
    """Answer of `GET /trl_atropos/info`: the server's properties and its present state."""

    protocol: int
    instance: str  # random: another one after a restart
    machine: str  # the same for two processes that may share memory
    vllm_version: str
    model: str
    dtype: str  # of the weights, as torch names it: "float32"
    device: str  # "cpu" or "cuda"
    device_uuids: list[str]  # of the workers' GPUs, in the order of their ranks; empty on the CPU
    num_workers: int  # data x tensor x pipeline parallel
    lora: LoraInfo | None  # None: started without --enable-lora
    # vLLM tells cached prefixes of an adapter apart by its path, not by its name alone
    prefixes_by_path: bool
    sleep: bool  # started with --enable-sleep-mode
    max_model_len: int  # tokens
    block_size: int  # tokens of one KV cache block
    vocab_size: int
    tokenizer_fingerprint: str | None  # None: the server runs without a tokenizer
    logprobs_mode: str
    numerics: str  # one of `NUMERICS`, that it was started with
    refusals: list[str]  # why this server's memory cannot be shared; empty: it can
    policy_version: int
    oldest_version_in_flight: int  # that some unfinished request began with
    paused: bool
    lease_held: bool


def machine_id() -> str:
    """Returns an id that is equal in two processes if, and only if, they see the same /proc and
    memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"


def tokenizer_fingerprint(vocabulary: dict[str, int]) -> str:
    """Returns a hash of a tokenizer's whole vocabulary: if it is equal in two processes, both mean
    the same tokens by the same ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# -------------------------------------------------------------------------------------- the weights


class CheckpointTensor(Strict):
    """A tensor of the checkpoint that is part of one parameter: a strided view of the parameter, in
    elements."""

    name: str
    size: list[int]
    stride: list[int]
    offset: int


class ParameterSpec(Strict):
    """One parameter of the trainer's model."""

    name: str
    shape: list[int]
    dtype: str  # as torch names it: "float32"
    # The checkpoint tensors that it consists of. None: one of the same name and shape. Empty: it is
    # computed from others.
    pieces: list[CheckpointTensor] | None = None

    @classmethod
    def of(cls, name: str, shape: Iterable[int], dtype: Any, pieces: Any = None) -> "ParameterSpec":
        """Returns the parameter's description. `dtype` is torch's."""
        dtype_name = str(dtype).removeprefix("torch.")
        return cls(name=name, shape=list(shape), dtype=dtype_name, pieces=pieces)


class View(Strict):
    """Place of a parameter in the server's memory. Offset and strides are in elements of
    `dtype`."""

    storage: int  # index into `Attachment.storages`
    offset: int
    size: list[int]
    stride: list[int]
    dtype: str


class Attachment(Strict):
    """Answer of `POST /trl_atropos/attach`: handles of the server's memory, and each parameter's
    place in it."""

    storages: list[dict]  # handles for `trl_atropos.tensors.shared_memory.open_storage`
    views: dict[str, View]
    refused: dict[str, str]  # parameter name -> why it cannot be a view


class TraceQuery(Strict):
    """Body of `POST /trl_atropos/fingerprints/trace`."""

    of: Literal["weights", "adapter"]
    parameters: list[ParameterSpec]


class FingerprintsReply(Strict):
    """Answer of `POST /trl_atropos/fingerprints`, for the parameters that were traced, in their
    order."""

    policy_version: int
    # None: the parameter was refused, or two workers keep different values
    fingerprints: list[int | None]
    # the server's own constants that are not what they were when they were first looked at
    changed: list[str] = []


# --------------------------------------------------------------- which versions sampled completions


Span = tuple[int, int]  # the policy versions at a completion's first and at its last token

# Fields of a request that mask or shift logits, beside the numbers in `SamplingSettings`, by vLLM's
# names.
RESHAPING_FIELDS = (
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "thinking_token_budget",
    "watermarking",
)


class SamplingSettings(NamedTuple):
    """Settings that a request's tokens are drawn with. With the defaults, tokens come from the
    distribution that the trainer computes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: of all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # `RESHAPING_FIELDS` that the request set, and logits processors of the server
    reshaped_by: tuple[str, ...] = ()

    def numbers(self) -> dict[str, float]:
        """Returns the settings by name, without `reshaped_by`."""
        numbers = self._asdict()
        del numbers["reshaped_by"]
        return numbers


class Note(NamedTuple):
    """Facts that the server notes about a completion."""

    span: Span
    settings: SamplingSettings

    def merged(self, other: "Note") -> "Note":
        """Returns the older versions of two equal completions, since nothing tells which of them is
        asked about."""
        first = min(self.span[0], other.span[0])
        last = min(self.span[1], other.span[1])
        return self._replace(span=(first, last))


class VersionsQuery(Strict):
    """Body of `POST /trl_atropos/versions`."""

    keys: list[str]  # of `completion_key`, in hexadecimal


class VersionsReply(Strict):
    """Answer of `POST /trl_atropos/versions`: for each key the policy versions at its first and at
    its last token."""

    versions: list[Span | None]  # None: no such completion is known
    settings: list[SamplingSettings]  # each once
    sampled_with: list[int | None]  # for each key, its index in `settings`

    @classmethod
    def of(cls, notes: Iterable[Note | None]) -> "VersionsReply":
        """Returns the answer with these notes, each of which stands for one key."""
        indices: dict[SamplingSettings, int] = {}
        versions = []
        sampled_with = []
        for note in notes:
            if note is None:
                versions.append(None)
                sampled_with.append(None)
                continue
            index = indices.setdefault(note.settings, len(indices))
            versions.append(note.span)
            sampled_with.append(index)
        return cls(versions=versions, settings=list(indices), sampled_with=sampled_with)

    def notes(self) -> list[Note | None]:
        """Returns the notes that `of` was given."""
        notes = []
        for span, index in zip(self.versions, self.sampled_with, strict=True):
            note = None
            if span is not None:
                note = Note(span, self.settings[index])
            notes.append(note)
        return notes


def completion_key(
    prompt_ids: "ArrayLike", completion_ids: "ArrayLike", logprobs: "ArrayLike"
) -> bytes:
    """
    Returns a 16-byte key of one sampled completion, equal on both sides. It includes the
    log-probabilities, which JSON leaves as they are, because completions repeat as a policy
    converges: by tokens alone, a third of them would be taken for those of another version.

    Args:
        prompt_ids: (p,) ids of all tokens before the completion, of earlier turns too.
        completion_ids: (c,) ids of the sampled tokens.
        logprobs: (c,) their log-probabilities in nats, finite, as float32 or what float32 was
        converted to.
    """
    # Not above: numpy reads variables that a recipe sets, and the recipe is read after this import.
    import numpy as np

    prompt = np.ascontiguousarray(prompt_ids, dtype="<i4")
    completion = np.ascontiguousarray(completion_ids, dtype="<i4")
    # adding 0.0 turns -0.0 into 0.0: there is one zero, not two
    values = np.ascontiguousarray(logprobs, dtype="<f4") + np.float32(0.0)
    lengths = np.array([prompt.size, completion.size], dtype="<i8")
    digest = hashlib.blake2b(lengths, digest_size=16)
    digest.update(prompt)
    digest.update(completion)
    digest.update(values)
    return digest.digest()


class EvaluationReply(Strict):
    """Answer of `POST /trl_atropos/evaluation`: the policy versions that sampled under one API key,
    if any did."""

    oldest: int | None
    newest: int | None


# ----------------------------------------------------------------------------- requests that failed


class Refusal(Strict):
    """Requests that the server answered with an error for one reason."""

    count: int
    seconds_ago: float  # of the last of them
    message: str  # of the last of them


class RefusalsReply(Strict):
    """Answer of `GET /trl_atropos/refusals`: since the server was started."""

    total: int
    latest: list[Refusal]  # by reason, the latest first


# ---------------------------------------------------------------------------------------- sessions


class SessionSettings(Strict):
    """Settings that hold for all calls of a session, whatever the client asks for. `None` leaves
    the client's own."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: of all tokens
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, ge=1)  # of one completion, if the client asks for more


class SessionQuery(Strict):
    """Body of `POST /trl_atropos/sessions`."""

    settings: SessionSettings = SessionSettings()
    # whether sampled ids take the place of those of a text that the client sends back
    reuse: bool = False
    # an API key that begins with `EVALUATION_KEY`: a hold does not stop this session
    evaluation: str | None = Field(None, pattern=f"^{EVALUATION_KEY}")
    deadline: float = Field(3600.0, gt=0)  # seconds from now on, after which it ends
    silence: float = Field(1800.0, gt=0)  # seconds without a call, after which it ends
    max_calls: int = Field(1000, ge=1)
    max_tokens: int = Field(1_000_000, ge=1)  # sampled in all calls together
    max_in_flight: int = Field(16, ge=1)  # calls at a time


class SessionOpened(Strict):
    """Answer of `POST /trl_atropos/sessions`."""

    id: str  # nobody can guess it, and who knows it may sample: keep it out of logs
    openai: str  # the base URL of OpenAI's clients, with `/v1`
    anthropic: str  # that of Anthropic's, which add `/v1` themselves


class SessionSegment(Strict):
    """Holds what one completion added to the tree of its session: its *path* is the first `at`
    tokens of the path of segment `parent`, and its own tokens behind them. A `parent` of -1 begins
    a context of its own, with `at` 0."""

    parent: int  # below the segment's own index
    at: int
    tokens: list[int]  # the end of the prompt, if no earlier segment has it, and what was sampled
    sampled: list[tuple[int, int]]  # the one stretch [start, end) of `tokens`, which ends with them
    logprobs: list[float]  # of the sampled tokens, one behind the other, in nats
    # (policy version, start, end) of the stretches of `tokens` that one version sampled
    versions: list[tuple[int | None, int, int]]


class SessionCall(Strict):
    """Describes one completion of a call, also one that sampled nothing."""

    call: int  # number of the call, from 0 on: equal for the completions of `n`
    segment: int  # -1: it sampled nothing
    route: str  # "/v1/chat/completions"
    settings: dict[str, Any]  # the fields of `SamplingSettings`
    finish: str  # "stop", "length", "repetition", "abort": vLLM's reasons
    # Why the trainer cannot compute the log-probabilities again, such as "min_tokens"; None: it can
    reason: str | None
    # False: this vLLM does not mark tokens, and a publish fell into the call. Then `versions` has
    # the oldest version that may have sampled them.
    versions_known: bool


class SessionReply(Strict):
    """Answer of `GET` and `DELETE /trl_atropos/sessions/ID`."""

    segments: list[SessionSegment]
    calls: list[SessionCall]
    # "calls", "completions", "tokens" (sampled and delivered by the engine), "context" (kept, and
    # not sampled), "in_flight" (calls), "marked/REASON" (tokens), "refused/REASON" (requests),
    # "reused" (earlier answers whose sampled ids replaced rendered ones, again in each call)
    counts: dict[str, int]
    ended: str | None  # why it ended; None: it goes on


class SessionSummary(Strict):
    """Describes one session in the answer of `GET /trl_atropos/sessions`."""

    id: str
    age: float  # seconds
    silence: float  # seconds since its last call, or since it was opened
    calls: int
    tokens: int  # sampled
    in_flight: int  # calls
    ended: str | None


class SessionsReply(Strict):
    """Answer of `GET /trl_atropos/sessions`."""

    sessions: list[SessionSummary]
    in_flight: int  # calls of all sessions
    # of all sessions since the server was started: "opened", "ended/REASON", and the sums of the
    # counts of ended sessions
    counts: dict[str, int]


class LoadReply(Strict):
    """Answer of `GET /trl_atropos/load`: how busy a server is."""

    in_flight: int  # requests for samples, of sessions and others
    sessions: int  # open ones
    counts: dict[str, int] = {}  # those of `SessionsReply`
