"""Starts the pods of a JobSet as processes on this computer, without GPUs. Like its controller, it restarts all after one has failed.

usage: jobset.py FILE.yaml FOLDER, which stands for the volume. One pod is evicted halfway.
"""
import os
import signal
import subprocess
import sys
import time

import yaml

file, folder = sys.argv[1:]
jobset = yaml.safe_load(open(file))
(group,) = jobset["spec"]["replicatedJobs"]
job = group["template"]["spec"]
pod = job["template"]["spec"]
(container,) = pod["containers"]
assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] and job["backoffLimit"] == 0
first = f"{jobset['metadata']['name']}-{group['name']}-0-0.{jobset['metadata']['name']}"


def value(entry, index):
    """An environment variable of a pod."""
    if "value" in entry:
        return {first: "127.0.0.1"}.get(entry["value"], entry["value"])
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']", path
    return str(index)


def start():
    """Starts all pods."""
    local = {"--device=cuda": "--device=cpu"}
    args = [local.get(a, a).replace("/job", folder, 1) for a in container["args"]]
    pods = []
    for index in range(job["completions"]):
        env = dict(os.environ, **{e["name"]: value(e, index) for e in container["env"]})
        pods.append(subprocess.Popen(container["command"] + args + ["-q"], env=env))
    return pods


def reached(step):
    """Waits until the log has a step."""
    for _ in range(600):
        try:
            if f'"step":{step},' in open(os.path.join(folder, "run.jsonl")).read():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.1)
    sys.exit(f"step {step} was never reached")


pods = start()
reached(100)
pods[2].send_signal(signal.SIGTERM)  # an eviction
codes = [p.wait(120) for p in pods]
print("exit codes after an eviction:", codes)
assert codes[2] == 75, "the evicted pod must count as failed, or its job would count as done"
codes = [p.wait(120) for p in start()]
print("exit codes of the second start:", codes)
assert codes == [0] * len(pods)
