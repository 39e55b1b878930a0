"""Scores an agent by the share of lower-case letters in what its model has said."""


def score(task, folder, output, episode):
    text = "".join(episode["completions"])
    letters = sum("a" <= character <= "z" for character in text)
    return {"score": letters / max(1, len(text)), "length": float(len(text))}
