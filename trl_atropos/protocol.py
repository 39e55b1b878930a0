"""What the trainer's side and the server's side agree on: route names, JSON shapes, and how command
lines are read.

Both sides import this module; neither imports the other. Everything that crosses the wire is JSON,
checked by these models where it enters.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict

from trl_atropos.errors import AtroposTrainingError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

PROTOCOL_VERSION = 10
ROUTE_PREFIX = "/trl_atropos"
TOKEN_VARIABLE = "TRL_ATROPOS_TOKEN"

VLLM_MODES = ("colocate", "server", "nccl_lora", "lora", "restart")
ADAPTER_MODES = ("nccl_lora", "lora")
NUMERICS = ("default", "float32_head", "float16", "bitwise")
# tokens, at least, that `bitwise` tells FlashAttention of: with fewer, keys are in other tiles
LONGEST_QUERY = 128
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's `--max-lora-rank` takes
# how the API keys begin by which servers know the requests of evaluations
EVALUATION_KEY = "evaluation-"
ADAPTER_NAME = "policy"  # of the adapter that is trained, on the server, whatever its version


def environment_token() -> str:
    """The control token in the environment, or "". Raises `AtroposTrainingError` if no HTTP header
    can carry it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    for position, char in enumerate(token, start=1):
        if not "!" <= char <= "~":
            kind = "a space or line break" if char.isspace() else "a control or non-ASCII character"
            where = (
                f"The control token in {TOKEN_VARIABLE} has {kind} at place {position} of "
                f"{len(token)}"
            )
            fix = (
                "Set it to letters and digits (`openssl rand -hex 24`), the same for trainer and "
                "server."
            )
            raise AtroposTrainingError(
                f"{where}, which no HTTP header can carry", kind, fix, "token"
            )
    return token


def served_rank(rank: int) -> int:
    """The least `--max-lora-rank` with which vLLM serves adapters of a rank."""
    return next((known for known in LORA_RANKS if known >= rank), rank)


def reason_in(text: str) -> str:
    """The message in the body of an error's answer: ours, or one of vLLM's routes, which have it
    one level deeper."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:300]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LoraInfo(Strict):
    """What adapters the server can serve."""

    max_rank: int
    max_loras: int  # in one batch
    dtype: str


class ServerInfo(Strict):
    """Answer of `GET /trl_atropos/info`: what the server is and where it stands."""

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
    # cached prefixes of an adapter are told apart by its path, not by its name alone
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


class CheckpointTensor(Strict):
    """A tensor of the checkpoint that is a part of one parameter, as a strided view of that, in
    elements."""

    name: str
    size: list[int]
    stride: list[int]
    offset: int


class ParameterSpec(Strict):
    """One parameter of the trainer's model."""

    name: str
    shape: list[int]
    dtype: str
    # The checkpoint tensors that it consists of. None: one of its own name and shape. Empty: it is
    # computed from some.
    pieces: list[CheckpointTensor] | None = None

    @classmethod
    def of(cls, name: str, shape: Iterable[int], dtype: Any, pieces: Any = None) -> "ParameterSpec":
        """`dtype` is torch's."""
        return cls(
            name=name, shape=list(shape), dtype=str(dtype).removeprefix("torch."), pieces=pieces
        )


class TraceQuery(Strict):
    """Body of `POST /trl_atropos/fingerprints/trace`."""

    of: Literal["weights", "adapter"]
    parameters: list[ParameterSpec]


class FingerprintsReply(Strict):
    """Answer of `POST /trl_atropos/fingerprints`: of each parameter that was traced."""

    policy_version: int
    # None: of a parameter that was refused, or that two workers keep differently
    fingerprints: list[int | None]
    # the server's own constants that are not what they were when they were first looked at
    changed: list[str] = []


class VersionsQuery(Strict):
    """Body of `POST /trl_atropos/versions`."""

    keys: list[str]  # of `completion_key`, in hexadecimal


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
    """What a request's tokens are drawn with; by default, from the distribution that the trainer
    computes."""

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
    """What is known of a completion."""

    span: Span
    settings: SamplingSettings

    def merged(self, other: "Note") -> "Note":
        """Of two equal completions: the older versions, since nothing tells which of the two is
        asked about."""
        (begun, ended), (begun_too, ended_too) = self.span, other.span
        return self._replace(span=(min(begun, begun_too), min(ended, ended_too)))


class VersionsReply(Strict):
    """Answer of `POST /trl_atropos/versions`: for each key the policy versions at its first and at
    its last token."""

    versions: list[Span | None]  # None: no such completion is known
    settings: list[SamplingSettings]  # each once
    sampled_with: list[int | None]  # for each key, which of `settings`

    @classmethod
    def of(cls, notes: Iterable[Note | None]) -> "VersionsReply":
        settings: dict[SamplingSettings, int] = {}
        versions = []
        sampled_with = []
        for note in notes:
            versions.append(note and note.span)
            sampled_with.append(note and settings.setdefault(note.settings, len(settings)))
        return cls(versions=versions, settings=list(settings), sampled_with=sampled_with)

    def notes(self) -> list[Note | None]:
        pairs = zip(self.versions, self.sampled_with, strict=True)
        return [span and Note(span, self.settings[number]) for span, number in pairs]


class Refusal(Strict):
    """Requests that the server has answered with an error, of one reason."""

    count: int
    seconds_ago: float  # of the last of them
    message: str  # of the last of them


class RefusalsReply(Strict):
    """Answer of `GET /trl_atropos/refusals`: since the server was started."""

    total: int
    latest: list[Refusal]  # by reason, the latest first


class EvaluationReply(Strict):
    """Answer of `POST /trl_atropos/evaluation`: the policy versions that sampled under one API key,
    if any did."""

    oldest: int | None
    newest: int | None


def evaluation_key(authorization: str) -> str | None:
    """The API key in the header of a request, if it is an evaluation's."""
    key = authorization.removeprefix("Bearer ")
    return key if key.startswith(EVALUATION_KEY) else None


def completion_key(
    prompt_ids: "ArrayLike", completion_ids: "ArrayLike", logprobs: "ArrayLike"
) -> bytes:
    """
    What both sides know one sampled completion by: a hash of 16 bytes. It includes the
    log-probabilities, which JSON leaves as they are, because completions repeat as a policy
    converges: by tokens alone, a third of them would be taken for those of another version.

    Args:
        prompt_ids: (p,) ids of all tokens before the completion, of earlier turns too.
        completion_ids: (c,) ids of the sampled tokens.
        logprobs: (c,) their log-probabilities in nats, finite, as float32 or what float32 was
        converted to.
    """
    # not above: it reads variables that a recipe sets, which is read by this module
    import numpy as np

    prompt, completion = (
        np.ascontiguousarray(ids, dtype="<i4") for ids in (prompt_ids, completion_ids)
    )
    # there is one zero, not two
    values = np.ascontiguousarray(logprobs, dtype="<f4") + np.float32(0.0)
    digest = hashlib.blake2b(np.array([prompt.size, completion.size], dtype="<i8"), digest_size=16)
    for part in (prompt, completion, values):
        digest.update(part)
    return digest.digest()


def machine_id() -> str:
    """The same in every process that sees the same /proc and memory as this one, and in no
    other."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"


class View(Strict):
    """Where a parameter lives in the server's memory. Offset and strides in elements of `dtype`."""

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


def tokenizer_fingerprint(vocabulary: dict[str, int]) -> str:
    """Hash of a tokenizer's whole vocabulary, to tell whether two processes mean the same tokens by
    the same ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# The flags that divide a vLLM server among GPUs, by vLLM's short names.
# `tests/server/test_launch.py` compares these with vLLM's own, and sees that the other flags which
# are looked for have none.
PARALLEL = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
}


def stated_flags(argv: Iterable[str], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
    """The flags of a command line with their last values, in either spelling (`--a v`, `--a=v`), or
    an empty text."""
    aliases = aliases or {}
    stated = {}
    flag = None
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--") or name in aliases:
            flag = aliases.get(name, name)
            stated[flag] = value
            flag = None if equals else flag
        elif flag is not None:
            stated[flag], flag = word, None
    return stated


def server_flags(argv: Iterable[str]) -> dict[str, str]:
    """Flags of a vLLM server by their long names: `--max_model_len 8`, `-tp 2` and `-tp=2` are
    stated, too."""
    return {flag.replace("_", "-"): value for flag, value in stated_flags(argv, PARALLEL).items()}


def values_of(flag: str, argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """All values of a flag that may be given several times, and the command line without it."""
    values = []
    rest = []
    words = iter(argv)
    for word in words:
        if word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        elif word == flag and (value := next(words, None)) is not None:
            values.append(value)
        else:
            rest.append(word)
    return values, rest


def stated_settings(argv: list[str]) -> dict[str, Any]:
    """The settings as they are written: of the recipe, its overlays, and the command line, each
    over those before."""
    (recipes, argv), settings = values_of("--config", argv), {}
    overlays, argv = values_of("--overlay", argv)
    for path in [*recipes, *overlays]:
        # the parser says it
        with contextlib.suppress(OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError):
            settings |= yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return settings | {flag.removeprefix("--"): value for flag, value in stated_flags(argv).items()}


def parallel(flags: Iterable[str]) -> tuple[int, str]:
    """GPUs that a server with these flags takes, and the flags that say so."""
    stated = server_flags(flags)
    stated = {flag: stated[flag] for flag in PARALLEL.values() if stated.get(flag, "").isdigit()}
    return math.prod(map(int, stated.values())), " ".join(
        f"{flag} {value}" for flag, value in stated.items()
    )
