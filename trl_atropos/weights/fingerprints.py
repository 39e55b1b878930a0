"""Proof that the servers have the trainer's weights: after a publish, both compute fingerprints,
and compare them.

The servers compute theirs while they sample, and both are compared before the weights change again.
So a proof is not in the way of a step, and at most one batch is sampled from weights that turn out
to be others.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel

from trl_atropos.distributed import together
from trl_atropos.errors import FingerprintError
from trl_atropos.protocol import FingerprintsReply, ParameterSpec
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors.fingerprint import Fingerprints, Part, fingerprint, joined
from trl_atropos.weights import gather
from trl_atropos.weights.transfer import Fingerprinted

logger = logging.getLogger(__name__)

NAMED = 3  # parameters that a message names


class Proof:
    """Of the publishes of one run. All methods are called on every rank."""

    def __init__(self, servers: Servers, subjects: list[Fingerprinted]):
        self.servers = servers
        self.subjects = [subject for subject in subjects if not subject.left_out]
        self._left_out = [subject for subject in subjects if subject.left_out]
        for subject in self._left_out:
            logger.warning(
                "The servers' %s cannot be compared bit for bit: %s.", subject.of, subject.left_out
            )
        self._compared: Counter[str] = Counter()  # how often, by subject
        # by server and subject that it traced, by name
        self._refused: dict[tuple[str, str], dict[str, str]] = {}
        self._begun: list[tuple[Fingerprinted, torch.Tensor, Future]] = []
        self.policy_version = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was left out, of this rank's servers. `judge` has found what was compared
        to be equal."""
        traced = [
            self._refused.get((client.url, one.of))
            for client in self.servers.clients
            for one in self.subjects
        ]
        return (
            bool(self.subjects) and not self._left_out and all(refused == {} for refused in traced)
        )

    def again(self) -> bool:
        """Has the servers look anew for their parameters, and compares all of them with the
        trainer's, also those that no publish moves. Returns whether nothing was left out, of all
        ranks' servers. Raises `FingerprintError`."""
        self.judge()
        for subject in self.subjects:
            self._begin(subject, anew=True)
        begun = self._begun
        self._begun = []
        self._judge(begun)
        return all(gather_object([self.complete]))

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    def begin(self, policy_version: int) -> None:
        """Computes the trainer's fingerprints, which are queued on the device, and has the servers
        compute theirs."""
        self.policy_version = policy_version
        for subject in self.subjects:
            if subject.times is None or self._compared[subject.of] < subject.times:
                self._begin(subject)

    def _begin(self, subject: Fingerprinted, anew: bool = False) -> None:
        own = subject.compute()
        self._begun.append(
            (subject, own, self.servers.each_in_background(partial(self._ask, subject, anew)))
        )

    def _ask(self, subject: Fingerprinted, anew: bool, client: ServerClient) -> FingerprintsReply:
        if anew or subject.moves or (client.url, subject.of) not in self._refused:
            self._trace(client, subject)
        return client.fingerprints(subject.of)

    def _trace(self, client: ServerClient, subject: Fingerprinted) -> None:
        known = self._refused.get((client.url, subject.of))
        refused = self._refused[client.url, subject.of] = client.trace(subject.of, subject.specs)
        if refused == known:
            return
        proven = sum(spec.name not in refused for spec in subject.specs)
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
                "; ".join(
                    f"{', '.join(names[:NAMED])} ({reason})" for reason, names in reasons.items()
                ),
            )

    def forget(self) -> None:
        """Of a comparison that has begun, and of what needs none any more: another training
        begins."""
        for _, _, asked in self._begun:
            asked.cancel()
        self._begun = []
        self._compared.clear()

    def judge(self) -> None:
        """Raises `FingerprintError` on every rank if a server has other weights than the
        trainer."""
        begun = self._begun
        self._begun = []
        self._judge(begun)
        self._compared.update(subject.of for subject, _, _ in begun)

    def _judge(self, begun: list[tuple[Fingerprinted, torch.Tensor, Future]]) -> None:
        for subject, own, asked in begun:
            together(
                lambda subject=subject, own=own, asked=asked: self._compare(subject, own, asked)
            )

    def _compare(self, subject: Fingerprinted, own: torch.Tensor, asked: Future) -> None:
        replies = asked.result()
        expected = joined(own) if replies else []
        for client, reply in zip(self.servers.clients, replies, strict=True):
            if reply.policy_version != self.policy_version:
                raise FingerprintError(
                    f"The server at {client.url} samples from policy version "
                    f"{reply.policy_version} but the trainer published {self.policy_version}: a "
                    "publish was lost, or another trainer writes to this server."
                )
            if reply.changed:
                names = ", ".join(reply.changed[:NAMED]) + " and others" * (
                    len(reply.changed) > NAMED
                )
                raise FingerprintError(
                    f"After publishing policy version {self.policy_version}, the server at "
                    f"{client.url} computes with other constants than when training began, "
                    f"although no publish changes them: {names}. Its memory was overwritten, or "
                    "something changed the model inside it: do not trust rollouts since the "
                    "publish before, start the server again, and resume from a checkpoint before "
                    "it."
                )
            wrong = [
                spec.name
                for spec, mine, served in zip(
                    subject.specs, expected, reply.fingerprints, strict=True
                )
                if mine != served and spec.name not in self._refused[client.url, subject.of]
            ]
            if wrong:
                names = ", ".join(wrong[:NAMED]) + " and others" * (len(wrong) > NAMED)
                raise FingerprintError(
                    f"After publishing policy version {self.policy_version}, {len(wrong)} of "
                    f"{len(expected)} parameters of the server at {client.url} are not bit for bit "
                    f"those that the trainer has: {names}. The server does not sample from the "
                    "weights that are trained: do not trust rollouts of this version, and resume "
                    "from a checkpoint before it."
                )


class OwnFingerprints:
    """
    The trainer's, of parameters in the dtypes in which they are published.

    Args:
        entries: what to compute them of, in the order of the result.
        buffers: what comes after these. Every rank has them whole.
        here: whether this rank needs them. Sharded trainers add up their parts in any case.
    """

    def __init__(
        self,
        entries: Callable[[], list[gather.Entry]],
        buffers: Callable[[], list[gather.Named]],
        accelerator: Accelerator,
        here: bool,
    ):
        self.entries = entries
        self.buffers = buffers
        self.accelerator = accelerator
        self.here = here
        self._known: tuple[list[int], Fingerprints] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._converted: list[Fingerprints] = []  # of each part, in the scratch memory

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        sharded = gather.sharding_of(self.accelerator) not in gather.WHOLE
        if not (self.here or sharded):
            return torch.zeros(0, 2, dtype=torch.int64)
        entries = self.entries()
        parts = [
            (values, part, gather.shape_of(parameter), number)
            for number, (_, parameter, dtype) in enumerate(entries)
            for values, part in gather.local_parts(parameter, self.accelerator)
        ]
        buffers = [buffer for _, buffer in self.buffers()]
        if not sharded or self.accelerator.is_main_process:
            numbered = enumerate(buffers, start=len(entries))
            parts += [
                (buffer, Part.whole(buffer.shape), buffer.shape, number)
                for number, buffer in numbered
            ]
        dtypes = [entry.dtype for entry in entries] + [buffer.dtype for buffer in buffers]
        sums = self._of_parts(parts, dtypes)
        if sharded:
            sums = sums.to(self.accelerator.device)
            dist.all_reduce(sums)
        return sums

    def _of_parts(self, parts: list[Any], dtypes: list[torch.dtype]) -> torch.Tensor:
        device = self.accelerator.device
        differs = [
            one.dtype != dtypes[number] or one.device.type != device.type
            for one, *_, number in parts
        ]
        if any(differs):
            return self._of_copies(parts, dtypes, device)
        addresses = [values.data_ptr() for values, *_ in parts]
        if self._known is None or self._known[0] != addresses:
            self._known = addresses, Fingerprints(parts, len(dtypes))
        return self._known[1].compute()

    def _of_copies(
        self, parts: list[Any], dtypes: list[torch.dtype], device: torch.device
    ) -> torch.Tensor:
        """Of parts that are converted, or not on the device: one by one, because a copy of all
        might not fit."""
        num_bytes = [values.numel() * dtypes[number].itemsize for values, *_, number in parts]
        if self._scratch.numel() < max(num_bytes):
            self._scratch = torch.empty(max(num_bytes), dtype=torch.uint8, device=device)
            self._converted = []
        sums = torch.zeros(len(dtypes), 2, dtype=torch.int64, device=device)
        for index, (values, part, shape, number) in enumerate(parts):
            copy = self._scratch[: num_bytes[index]].view(dtypes[number]).view(values.shape)
            copy.copy_(values)
            if index == len(self._converted):
                self._converted.append(Fingerprints([(copy, part, shape, 0)], 1))
            sums[number] += self._converted[index].compute()[0]
        return sums


def checkpoint_specs(trainer: Any, servers: Servers) -> list[ParameterSpec]:
    """Of the parameters as the servers have them, and of the checkpoint's buffers (a router's
    correction bias), with the tensors of a checkpoint that they consist of."""
    shapes = gather.shapes_of(
        trainer.model, trainer.accelerator, getattr(torch, servers.info.dtype)
    )
    buffers = {
        name: (buffer.shape, buffer.dtype) for name, buffer in gather.buffers_of(trainer.model)
    }
    return gather.CheckpointPlan(gather.base_model(trainer.model), shapes | buffers).specs()


def fingerprinted_weights(trainer: Any, servers: Servers, merged: bool = True) -> Fingerprinted:
    """All weights, as they are published: an adapter is merged into them, unless the servers have
    it apart."""
    accelerator = trainer.accelerator
    here = bool(servers.clients)
    dtype = getattr(torch, servers.info.dtype)
    buffers = lambda: gather.buffers_of(trainer.model)  # noqa: E731
    # The trainer's model as it is then: FSDP2 replaces its parameters when training begins.
    if merged and isinstance(trainer.model, PeftModel):
        parameters = lambda: gather.iter_full_parameters(trainer.model, accelerator, dtype)  # noqa: E731
        compute = lambda: of_stream(itertools.chain(parameters(), buffers()), here)  # noqa: E731
    else:
        entries = lambda: gather.entries_of(trainer.model, accelerator, dtype)  # noqa: E731
        compute = OwnFingerprints(entries, buffers, accelerator, here)
    return Fingerprinted("weights", checkpoint_specs(trainer, servers), compute)


def fingerprinted_base(trainer: Any, servers: Servers) -> Fingerprinted:
    """Weights that no publish moves, without the adapter: of `colocate`, and of a model that is
    frozen."""
    return fingerprinted_weights(trainer, servers, merged=False)._replace(times=1)


@torch.no_grad()
def of_stream(named: Iterable[gather.Named], here: bool) -> torch.Tensor:
    """Of whole parameters as they are gathered, which every rank takes part in."""
    sums = [fingerprint(tensor) for _, tensor in named if here]
    return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.int64)
