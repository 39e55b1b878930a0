"""What environments are called in messages, metrics and on disk. The API knows them by number, and tells no names."""

from collections.abc import Callable, Mapping


class EnvironmentNames:
    """
    Args:
        look_up: returns the names that are known by now, by number: those of the environments that the run started.
    """

    def __init__(self, look_up: Callable[[], Mapping[int, str]] = dict):
        self._look_up = look_up
        self._names: dict[int, str | None] = {}  # of those that were asked for

    def name(self, env_id: int | None) -> str | None:
        """The name of an environment that has delivered something, `None` if it is not known."""
        if env_id is None:
            return None
        if env_id not in self._names:
            self._names[env_id] = self._look_up().get(env_id)
        return self._names[env_id]

    def label(self, env_id: int | None) -> str:
        """What follows the word "environment" in a message: its name, or its number at the API."""
        return self.name(env_id) or ("without a number" if env_id is None else str(env_id))

    def forget(self) -> None:
        """The API numbers its environments anew."""
        self._names = {}
