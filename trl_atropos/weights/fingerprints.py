"""Proof that the servers have the trainer's weights: after a publish, both compute fingerprints, and compare them.

The servers compute theirs while they sample, and both are compared before the weights change again. So a proof is not
in the way of a step, and at most one batch is sampled from weights that turn out to be others.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel

from trl_atropos.distributed import together
from trl_atropos.errors import FingerprintError
from trl_atropos.protocol import FingerprintsReply, ParameterSpec
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors.fingerprint import Fingerprints, fingerprint, unsigned
from trl_atropos.weights import gather
from trl_atropos.weights.transfer import Fingerprinted

logger = logging.getLogger(__name__)

NAMED = 3  # parameters that a message names


class Proof:
    """Of the publishes of one run. All methods are called on every rank."""

    def __init__(self, servers: Servers, subjects: list[Fingerprinted]):
        self.servers, self.subjects = servers, subjects
        self._compared: Counter[str] = Counter()  # how often, by subject
        self._refused: dict[tuple[str, str], dict[str, str]] = {}  # by server and subject that it traced, by name
        self._begun: list[tuple[Fingerprinted, torch.Tensor, Future]] = []
        self.policy_version = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was left out, on ranks with servers. `judge` has found what was compared to be equal."""
        return bool(self._refused) and not any(self._refused.values())

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    def begin(self, policy_version: int) -> None:
        """Computes the trainer's fingerprints, which are queued on the device, and has the servers compute theirs."""
        self.policy_version = policy_version
        for subject in self.subjects:
            if subject.times is None or self._compared[subject.of] < subject.times:
                own = subject.compute()
                self._begun.append((subject, own, self.servers.each_in_background(partial(self._ask, subject))))

    def _ask(self, subject: Fingerprinted, client: ServerClient) -> FingerprintsReply:
        if subject.moves or (client.url, subject.of) not in self._refused:
            self._trace(client, subject)
        return client.fingerprints(subject.of)

    def _trace(self, client: ServerClient, subject: Fingerprinted) -> None:
        known = self._refused.get((client.url, subject.of))
        refused = self._refused[client.url, subject.of] = client.trace(subject.of, subject.specs)
        if refused == known:
            return
        proven = len(subject.specs) - len(refused)
        when = "after every publish" if subject.times is None else "when training begins"
        told = "%s: %d of %d parameters are compared bit for bit %s"
        logger.info(told, client.url, proven, len(subject.specs), when)
        if refused:
            reasons: dict[str, list[str]] = {}
            for name, reason in refused.items():
                reasons.setdefault(reason, []).append(name)
            logger.warning(
                "%d parameters of the server at %s cannot be compared bit for bit: %s.",
                *(len(refused), client.url),
                "; ".join(f"{', '.join(names[:NAMED])} ({reason})" for reason, names in reasons.items()),
            )

    def forget(self) -> None:
        """Of a comparison that has begun, and of what needs none any more: another training begins."""
        for _, _, asked in self._begun:
            asked.cancel()
        self._begun = []
        self._compared.clear()

    def judge(self) -> None:
        """Raises `FingerprintError` on every rank if a server has other weights than the trainer."""
        begun, self._begun = self._begun, []
        for subject, own, asked in begun:
            together(lambda subject=subject, own=own, asked=asked: self._compare(subject, own, asked))
            self._compared[subject.of] += 1

    def _compare(self, subject: Fingerprinted, own: torch.Tensor, asked: Future) -> None:
        replies = asked.result()
        expected = unsigned(own) if replies else []
        for client, reply in zip(self.servers.clients, replies, strict=True):
            if reply.policy_version != self.policy_version:
                raise FingerprintError(
                    f"The server at {client.url} samples from policy version {reply.policy_version} but the trainer "
                    f"published {self.policy_version}: a publish was lost, or another trainer writes to this server."
                )
            wrong = [
                spec.name
                for spec, mine, served in zip(subject.specs, expected, reply.fingerprints, strict=True)
                if mine != served and spec.name not in self._refused[client.url, subject.of]
            ]
            if wrong:
                names = ", ".join(wrong[:NAMED]) + " and others" * (len(wrong) > NAMED)
                raise FingerprintError(
                    f"After publishing policy version {self.policy_version}, {len(wrong)} of {len(expected)} "
                    f"parameters of the server at {client.url} are not bit for bit those that the trainer has: "
                    f"{names}. The server does not sample from the weights that are "
                    "trained: do not trust rollouts of this version, and resume from a checkpoint before it."
                )


class OwnFingerprints:
    """
    The trainer's, of parameters in the dtypes in which they are published.

    Args:
        entries: what to compute them of, in the order of the result.
        here: whether this rank needs them. Sharded trainers add up their parts in any case.
    """

    def __init__(self, entries: Callable[[], list[gather.Entry]], accelerator: Accelerator, here: bool):
        self.entries, self.accelerator, self.here = entries, accelerator, here
        self._known: tuple[list[int], Fingerprints] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._converted: list[Fingerprints] = []  # of each part, in the scratch memory

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        sharded = gather.sharding_of(self.accelerator) not in gather.WHOLE
        if not (self.here or sharded):
            return torch.zeros(0, dtype=torch.int64)
        entries = self.entries()
        parts = [
            (values, part, gather.shape_of(parameter), number)
            for number, (_, parameter, dtype) in enumerate(entries)
            for values, part in gather.local_parts(parameter, self.accelerator)
        ]
        sums = self._of_parts(parts, [entry.dtype for entry in entries])
        if sharded:
            sums = sums.to(self.accelerator.device)
            dist.all_reduce(sums)
        return sums

    def _of_parts(self, parts: list[Any], dtypes: list[torch.dtype]) -> torch.Tensor:
        device = self.accelerator.device
        differs = [one.dtype != dtypes[number] or one.device.type != device.type for one, *_, number in parts]
        if any(differs):
            return self._of_copies(parts, dtypes, device)
        addresses = [values.data_ptr() for values, *_ in parts]
        if self._known is None or self._known[0] != addresses:
            self._known = addresses, Fingerprints(parts, len(dtypes))
        return self._known[1].compute()

    def _of_copies(self, parts: list[Any], dtypes: list[torch.dtype], device: torch.device) -> torch.Tensor:
        """Of parts that are converted, or not on the device: one by one, because a copy of all might not fit."""
        num_bytes = [values.numel() * dtypes[number].itemsize for values, *_, number in parts]
        if self._scratch.numel() < max(num_bytes):
            self._scratch, self._converted = torch.empty(max(num_bytes), dtype=torch.uint8, device=device), []
        sums = torch.zeros(len(dtypes), dtype=torch.int64, device=device)
        for index, (values, part, shape, number) in enumerate(parts):
            copy = self._scratch[: num_bytes[index]].view(dtypes[number]).view(values.shape)
            copy.copy_(values)
            if index == len(self._converted):
                self._converted.append(Fingerprints([(copy, part, shape, 0)], 1))
            sums[number] += self._converted[index].compute()[0]
        return sums


def checkpoint_specs(trainer: Any, servers: Servers) -> list[ParameterSpec]:
    """Of the parameters as the servers have them, with the tensors of a checkpoint that they consist of."""
    shapes = gather.shapes_of(trainer.model, trainer.accelerator, getattr(torch, servers.info.dtype))
    return gather.CheckpointPlan(gather.base_model(trainer.model), shapes).specs()


def fingerprinted_weights(
    trainer: Any, servers: Servers, specs: list[ParameterSpec], merged: bool = True
) -> Fingerprinted:
    """All weights, as they are published: an adapter is merged into them, unless the servers have it apart."""
    accelerator, here, dtype = trainer.accelerator, bool(servers.clients), getattr(torch, servers.info.dtype)
    # The trainer's model as it is then: FSDP2 replaces its parameters when training begins.
    if merged and isinstance(trainer.model, PeftModel):
        compute = lambda: of_stream(gather.iter_full_parameters(trainer.model, accelerator, dtype), here)  # noqa: E731
    else:
        compute = OwnFingerprints(lambda: gather.entries_of(trainer.model, accelerator, dtype), accelerator, here)
    return Fingerprinted("weights", specs, compute)


def fingerprinted_base(trainer: Any, servers: Servers) -> Fingerprinted:
    """Weights that no publish moves, without the adapter: of `colocate`, and of a model that is frozen."""
    specs = checkpoint_specs(trainer, servers)
    return fingerprinted_weights(trainer, servers, specs, merged=False)._replace(times=1)


@torch.no_grad()
def of_stream(named: Iterable[gather.Named], here: bool) -> torch.Tensor:
    """Of whole parameters as they are gathered, which every rank takes part in."""
    sums = [fingerprint(tensor) for _, tensor in named if here]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
