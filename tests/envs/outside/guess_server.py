"""An OpenEnv server of a guessing game: `python guess_server.py PORT`; it needs openenv."""

import random
import sys
from typing import Any, ClassVar


def app() -> Any:
    """The server's application. Imported here: pytest imports this file where openenv is not installed."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        """A text with a digit."""

        text: str

    class Hint(Observation):
        """A hint."""

        hint: str

    class Guessing(Environment):
        """Guess a number from 1 to 9, which follows from the seed; a step earns 1 for it, and 0.1 for a digit."""

        SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = True

        def __init__(self) -> None:
            super().__init__()
            self._state, self._secret = State(), 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Hint:
            self._secret, self._state = random.Random(seed).randint(1, 9), State(episode_id=episode_id)
            return Hint(hint="Guess a number from 1 to 9.")

        def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Hint:
            self._state.step_count += 1
            digits = [int(sign) for sign in action.text if sign in "0123456789"]
            right = digits[:1] == [self._secret]
            return Hint(hint="Right." if right else "No.", done=right, reward=1.0 if right else 0.1 * bool(digits))

        @property
        def state(self) -> State:
            return self._state

    return create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
