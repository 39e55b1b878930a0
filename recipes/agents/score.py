"""Scores an agent by the share of lower-case letters in what its model has said."""

import string


def score(task, folder, output, episode):
    text = "".join(episode["completions"])
    letters = 0
    for character in text:
        if character in string.ascii_lowercase:
            letters += 1
    share = letters / max(1, len(text))
    return {"score": share, "length": len(text)}
