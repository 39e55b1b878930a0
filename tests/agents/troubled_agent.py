"""An agent that nobody wants, in the standard library: does what its task says."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request


def call(max_tokens: int = 8) -> str:
    """Calls the model, and returns what it said."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": max_tokens,
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def leave_orphans() -> None:
    """Leaves a process that ignores SIGTERM, in a session of its own, and its child."""
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    time.sleep(600)


def main() -> None:
    (behaviour,) = sys.argv[1:]
    if behaviour == "silent":
        return
    if behaviour == "broken":
        raise ImportError("no module named so")
    if behaviour == "parallel":
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    call()
    if behaviour == "crash":
        os.abort()
    if behaviour == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if behaviour == "flood":
        while True:
            os.write(1, b"flood " * 10_000)
    if behaviour == "orphans":
        leave_orphans()
    if behaviour == "walk away":  # while the model still answers
        threading.Thread(target=call, args=(400,), daemon=True).start()
        time.sleep(0.3)


if __name__ == "__main__":
    main()
