"""deploy/kubernetes/keys: a Secret of callers' keys, in the place where the configuration looks for it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.cli.commands import main
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.keys.key_file import read_keys
from tests.deploy.known import DEPLOY
from tests.deploy.manifest import SECRET, findings, read

FOLDER = DEPLOY / "kubernetes"
BASE = (FOLDER / "raycluster.yaml").read_text(encoding="utf-8")
COMPONENT = (FOLDER / "keys" / "kustomization.yaml").read_text(encoding="utf-8")
NAMED = "TANDEM_SECURITY__KEYS_FILE"


def patched(component: str) -> str:
    """The base as kustomize would patch it: JSON patches that add to lists."""
    found = yaml.safe_load(component)
    assert (found["apiVersion"], found["kind"]) == ("kustomize.config.k8s.io/v1alpha1", "Component")
    objects = [*yaml.safe_load_all(BASE)]
    for patch in found["patches"]:
        target = patch["target"]
        (changed,) = [
            one for one in objects if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        for step in yaml.safe_load(patch["patch"]):
            place: Any = changed
            *path, last = step["path"].strip("/").split("/")
            for part in path:
                place = place[int(part) if isinstance(place, list) else part]
            assert (step["op"], last) == ("add", "-")
            place.append(step["value"])
    return yaml.safe_dump_all(objects)


def wrong(text: str) -> list[str]:
    """What is wrong with a manifest, and with its keys."""
    manifest = read(text)
    named = manifest.environ.get(NAMED, "")
    mounts = {mount["name"]: mount for mount in manifest.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in manifest.pod["volumes"]}
    secret = volumes.get("keys", {}).get("secret", {})
    found = findings(text)
    if named != f"{mounts.get('keys', {}).get('mountPath')}/keys.yaml":
        found.append(f"{NAMED} is {named}, which is not mounted")
    if not mounts.get("keys", {}).get("readOnly") or "subPath" in mounts.get("keys", {}):
        found.append("a mount of one path would never change")
    if secret.get("defaultMode", 0o644) & 0o022:
        found.append("others may write it")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(manifest.config_text)
        file.flush()
        given = {name: value for name, value in manifest.environ.items() if name.startswith("TANDEM_")}
        try:
            config = load_config(file.name, (), given | {"TANDEM_SECURITY__API_KEY": SECRET})
        except ConfigError as error:
            return [*found, str(error)]
    if str(config.security.keys_file) != named:
        found.append(f"security.keys_file is {config.security.keys_file}")
    return found


def test_the_component_mounts_what_it_names() -> None:
    assert wrong(patched(COMPONENT)) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("mountPath: /etc/tandem-keys", "mountPath: /etc/tandem", "which is not mounted"),
        (", readOnly: true", "", "would never change"),
        ("0440", "0666", "others may write it"),
        ("SECURITY__KEYS_FILE", "SECURITY__KEY_FILE", "unknown key security.key_file"),
        ("{name: keys, mountPath", "{name: other, mountPath", "not mounted, or not there"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in COMPONENT
    found = wrong(patched(COMPONENT.replace(before, after, 1)))
    assert finding in " ".join(found), found


def test_a_mounted_secret_is_read_and_read_again(tmp_path: Path) -> None:
    """kubelet writes a folder of another name, and moves a link to it."""
    for number in range(2):
        (tmp_path / f"..{number}").mkdir()
        with pytest.raises(SystemExit) as ended:
            main(["key", "new", f"key-{number}", "--file", str(tmp_path / f"..{number}" / "keys.yaml")])
        assert ended.value.code == 0
        (tmp_path / f"..{number}" / "keys.yaml").chmod(0o440)
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    before = os.stat(tmp_path / "keys.yaml")
    assert [key.name for key in read_keys(tmp_path / "keys.yaml")] == ["key-0"]
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert [key.name for key in read_keys(tmp_path / "keys.yaml")] == ["key-1"]
    assert os.stat(tmp_path / "keys.yaml").st_ino != before.st_ino


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.long
def test_kustomize_makes_the_same_of_it(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    wanted = {"resources": ["../kubernetes"], "components": ["../kubernetes/keys"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    command = ["kubectl", "kustomize", str(overlay)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert {one["kind"]: one for one in yaml.safe_load_all(made)} == {
        one["kind"]: one for one in yaml.safe_load_all(patched(COMPONENT))
    }
