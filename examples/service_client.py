"""Start the grading service, and grade through its client.

    python examples/service_client.py

Training machines need only the client (pip install "kbx_env[client]"); the service needs kbx_env[serve].
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kbx_env.client import Client

SOURCE = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()

if __name__ == "__main__":
    store = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "gradings.sqlite"
    command = [sys.executable, "-m", "kbx_env", "serve", "--backend", "cpu", "--workers", "1", "--port", "0", "--store", str(store)]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert service.stdout is not None
        line = next(line for line in service.stdout if "listening on" in line)
        url = re.findall(r"http://\S+", line)[0]
        with Client(url) as client:
            outcome = client.grade("math/exp_sqrt", SOURCE, split="train", targets=())  # an Outcome, as of kbx_env.grade
            print(outcome.verdict, outcome.cases.passed if outcome.cases else None, "cases")
            pairs = [("math/exp_sqrt", SOURCE), ("math/exp_sqrt", SOURCE.replace("0.5", "0.25"))]
            for number, outcome in sorted(client.grade_many(pairs, split="train", targets=()), key=lambda pair: pair[0]):
                print(number, outcome.verdict)
    finally:
        service.terminate()  # it drains: running gradings end, and their outcomes stay in the store
        print("the service ended with", service.wait(60))
