"""locust: some users for some seconds; no request fails."""

import gevent
from locust import HttpUser, constant, task
from locust.env import Environment
from locust.log import setup_logging
from steps import API_KEY, CHAT, HTTP, MODEL, check, run

REQUESTS = 24  # of all users
setup_logging("WARNING")


class Chatter(HttpUser):
    host = HTTP
    wait_time = constant(0)

    @task
    def chat(self) -> None:
        body = {"model": MODEL, "messages": CHAT, "max_tokens": 8}
        self.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {API_KEY}"})

    @task
    def models(self) -> None:
        self.client.get("/v1/models", headers={"authorization": f"Bearer {API_KEY}"})


def users() -> None:
    environment = Environment(user_classes=[Chatter], events=None)
    runner = environment.create_local_runner()
    runner.start(4, spawn_rate=4)
    with gevent.Timeout(60, False):
        while environment.stats.total.num_requests < REQUESTS:
            gevent.sleep(0.05)
    runner.quit()
    total = environment.stats.total
    check(total.num_requests >= REQUESTS, f"{REQUESTS} requests within a minute", total.num_requests)
    failed = {str(name): error.to_dict() for name, error in environment.stats.errors.items()}
    check(not failed, "none fails", failed)


if __name__ == "__main__":
    run(users)
