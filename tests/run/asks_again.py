"""A task of two turns, whatever is said in the first; imported by name in a mixture."""

from grpo_rl.envs.base import Reward, Task


class Again(Task):
    """Asks once more; the digits of both turns earn 0.25 each, up to 1."""

    reward_parts = ("digits",)
    reply_role = "user"

    def __init__(self, rows):
        self.rows = rows

    def prompt(self, row):
        return [{"role": "user", "content": row["question"]}]

    def reply(self, row, messages):
        said = sum(message["role"] == "assistant" for message in messages)
        return [{"role": "user", "content": "Again?"}] if said < 2 else None

    def score(self, row, response):
        return Reward({"digits": min(1.0, 0.25 * sum(sign in "0123456789" for sign in response))})

    def score_dialog(self, row, messages):
        return self.score(row, "".join(m["content"] for m in messages if m["role"] == "assistant"))
