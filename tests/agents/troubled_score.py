"""Scores of the troubled agent."""


def score(task, folder, output, episode):
    if task == "bad score":
        raise KeyError("colour")
    return {"score": float(episode["calls"]), "tokens": episode["tokens"]}
