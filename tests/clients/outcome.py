"""The outcome of one client's script."""

import subprocess
from dataclasses import dataclass, field
from typing import Any, Self

from tests.clients.scripts import Script

MOST_SAID = 2000  # characters of a script's errors


@dataclass(frozen=True)
class Outcome:
    """kind: passed, failed or skipped. reason: why not passed. steps: ok, or a reason, by the step's name."""

    script: Script
    kind: str
    version: str = ""
    reason: str = ""
    steps: dict[str, str] = field(default_factory=dict)

    @classmethod
    def skipped(cls, script: Script, reason: str, version: str = "") -> Self:
        return cls(script, "skipped", version, reason)

    @classmethod
    def of(cls, script: Script, version: str, ended: "subprocess.CompletedProcess[str]") -> Self:
        """Steps are what the script's lines say. One that says nothing, or ends as no line says, failed."""
        steps = steps_of(ended.stdout)
        failed = {name: reason for name, reason in steps.items() if reason != "ok"}
        if failed:
            reason = "; ".join(f"{name}: {why}" for name, why in failed.items())
        elif ended.returncode or not steps:
            reason = f"exit code {ended.returncode}: {ended.stderr[-MOST_SAID:]}"
        else:
            return cls(script, "passed", version, steps=steps)
        return cls(script, "failed", version, reason, steps)

    @property
    def summary(self) -> dict[str, Any]:
        known = {"client": self.script.package, "version": self.version, "script": self.script.name, "is": self.kind}
        return known | ({"reason": self.reason} if self.reason else {}) | ({"steps": self.steps} if self.steps else {})


def steps_of(output: str) -> dict[str, str]:
    """Lines `ok NAME` and `failed NAME: reason`; a client's own lines are left out."""
    steps: dict[str, str] = {}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        name, _, reason = rest.partition(": ")
        if word == "ok":
            steps[rest] = "ok"
        elif word == "failed":
            steps[name] = reason or "no reason was given"
    return steps
