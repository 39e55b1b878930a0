"""What the trainer's side and the server's side agree on: route names, JSON shapes, and nothing else.

Both sides import this module; neither imports the other. Everything that crosses the wire is JSON, checked by these
models where it enters.
"""

import hashlib
import json

from pydantic import BaseModel, ConfigDict

PROTOCOL_VERSION = 1
ROUTE_PREFIX = "/trl_atropos"
TOKEN_VARIABLE = "TRL_ATROPOS_TOKEN"

# Methods of the worker extension, called in every worker of the server. The prefix keeps them apart from vLLM's own.
DESCRIBE_METHOD = "trl_atropos_describe"
ATTACH_METHOD = "trl_atropos_attach"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ServerInfo(Strict):
    """Answer of `GET /trl_atropos/info`: what the server is and where it stands."""

    protocol: int
    vllm_version: str
    model: str
    dtype: str  # of the weights, as torch names it: "float32"
    device: str  # "cpu" or "cuda"
    max_model_len: int  # tokens
    block_size: int  # tokens of one KV cache block
    vocab_size: int
    tokenizer_fingerprint: str | None  # None: the server runs without a tokenizer
    logprobs_mode: str
    refusals: list[str]  # why this server's memory cannot be shared; empty: it can
    policy_version: int
    paused: bool
    lease_held: bool


class ParameterSpec(Strict):
    """One parameter of the trainer's model, as its checkpoint names it."""

    name: str
    shape: list[int]
    dtype: str


class View(Strict):
    """Where a parameter lives in the server's memory. Offset and strides in elements of `dtype`."""

    storage: int  # index into `Attachment.storages`
    offset: int
    size: list[int]
    stride: list[int]
    dtype: str


class Attachment(Strict):
    """Answer of `POST /trl_atropos/attach`: handles of the server's memory, and each parameter's place in it."""

    storages: list[dict]  # handles for `trl_atropos.transport.open_storage`
    views: dict[str, View]
    refused: dict[str, str]  # parameter name -> why it cannot be a view


def tokenizer_fingerprint(vocabulary: dict[str, int]) -> str:
    """Hash of a tokenizer's whole vocabulary, to tell whether two processes mean the same tokens by the same ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
