"""The reward of this task. staleflow calls ``score`` once for each answer, in processes of its own."""


def score(prompt: str, completion: str, answer: str, **columns: object) -> float:
    """1 for exactly the right answer, else 0.

    ``completion`` is what the model wrote behind ``prompt``, as text. ``answer`` is a column of prompts.jsonl; every
    other column of a row comes as a keyword argument too. Any number will do: only differences within a group count.
    The function may be ``async``, and may raise: then it is tried again, ``reward.retries`` times.
    """
    return 1.0 if completion.strip() == answer else 0.0
