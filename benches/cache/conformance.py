"""npm's http-cache-tests against varve-cache-proxy and Debian's four, one after the other, before the suite's own
server. `python3 conformance.py SUITE`, where SUITE is the folder of the package (`npm install http-cache-tests`).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import peers

SUITE = pathlib.Path(sys.argv[1]).resolve()
KINDS = """
import tests from './tests/index.mjs'
import surrogate from './tests/surrogate-control.mjs'
tests.push(surrogate)
const out = {}
for (const suite of tests) for (const test of suite.tests) {
  if (!test.browser_only) out[test.id] = test.kind || 'required'
}
console.log(JSON.stringify(out))
"""


def node(script, **env):
    """Runs the suite's JavaScript; its output."""
    done = subprocess.run(["node", "--no-warnings", *script], cwd=SUITE, capture_output=True, text=True,
                          env={**os.environ, **env}, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def main():
    kinds = json.loads(node(["--input-type=module", "-e", KINDS]))
    count = {kind: sum(1 for k in kinds.values() if k == kind) for kind in ("required", "optimal", "check")}
    print(f"{len(kinds)} tests for proxies: {count['required']} required, {count['optimal']} optimal, "
          f"{count['check']} look")
    origin = peers.free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            ["node", "--no-warnings", "server/server.mjs"], cwd=SUITE, stdout=subprocess.DEVNULL,
            env={**os.environ, "npm_config_protocol": "http", "npm_config_port": str(origin),
                 "npm_config_pidfile": f"{folder}/pid"})
        try:
            peers.wait_for(origin, server)
            print(f"{'':<14} {'version':<8} {'all':>5} {'required':>9} {'optimal':>8} {'look':>5} {'s':>5}")
            missed = {}
            for name in peers.installed():
                extra = {"varve": "[cache]\nstore_set_cookie = true\n"}
                with peers.running(name, f"127.0.0.1:{origin}", 1024, 64, extra) as peer:
                    began = time.time()
                    out = node(["cli.mjs"], npm_config_id="", npm_package_config_id="",
                               npm_config_base=f"http://localhost:{peer.port}")
                    seconds = time.time() - began
                results = json.loads(out[out.index("{"):])
                passed = {t for t in kinds if results.get(t) is True}
                missed[name] = sorted(t for t in kinds if kinds[t] == "required" and t not in passed)
                of = [sum(1 for t in passed if kinds[t] == kind) for kind in count]
                print(f"{name:<14} {peers.version(name):<8} {len(passed):>5} {of[0]:>9} {of[1]:>8} {of[2]:>5} "
                      f"{seconds:>5.0f}", flush=True)
            for name, tests in missed.items():
                if name == "varve":
                    print(f"required, not passed by {name}: {', '.join(tests) or 'none'}")
                else:
                    print(f"required, not passed by {name}: {len(tests)}")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
