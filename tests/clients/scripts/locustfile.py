"""Locust users that request counts and check every answer, ASKED times each."""

from locust import HttpUser, constant
from locust.contrib.fasthttp import FastHttpUser
from locust.exception import StopUser

ASKED = 10
EACH = 4
done = 0


class Counting:
    """Asks for ever longer counts, by chat or by completion."""

    wait_time = constant(0)
    asked = 0

    def on_stop(self) -> None:
        global done
        done += 1
        if done == 2 * EACH:
            self.environment.runner.quit()

    def count(self) -> None:
        if self.asked == ASKED:
            raise StopUser
        last = self.asked + 3
        self.asked += 1
        right = " ".join(map(str, range(last + 1)))
        body = {"model": "demo", "temperature": 0, **self.question(f"Count from 0 to {last}.")}
        with self.client.post(self.path, json=body, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text}")
            elif (message := self.answer(response.json()["choices"][0])) != right:
                response.failure(f"{message!r}, not {right!r}")


class Talker(Counting, HttpUser):
    tasks = (Counting.count,)
    path = "/v1/chat/completions"
    fixed_count = EACH

    def question(self, text: str) -> dict:
        return {"messages": [{"role": "user", "content": text}]}

    def answer(self, choice: dict) -> str:
        return choice["message"]["content"]


class Completer(Counting, FastHttpUser):
    tasks = (Counting.count,)
    path = "/v1/completions"
    fixed_count = EACH

    def question(self, text: str) -> dict:
        return {"prompt": f"{text}\n", "max_tokens": 100}

    def answer(self, choice: dict) -> str:
        return choice["text"]
