"""Reading somebody else's command line: which flags it states, without knowing what they mean."""


def stated_flags(argv: list[str]) -> dict[str, str]:
    """Flags of a command line with their values, in either spelling (`--a v`, `--a=v`)."""
    stated = {}
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            stated[flag] = value or following
    return stated
