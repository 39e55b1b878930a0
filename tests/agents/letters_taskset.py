"""A taskset of verifiers 0.4 for `test_verifiers.py`: three words to be spelled."""

import importlib

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersConfig(vf.TasksetConfig):
    words: int = 3
    needs: str = ""  # a module that is imported to load the tasks


class LettersTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

    @vf.reward(weight=2.0)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        if self.config.needs:
            importlib.import_module(self.config.needs)
        for word in ("cab", "dig", "fee")[: self.config.words]:
            yield LettersTask(vf.TaskData(prompt=word), self.config.task)
