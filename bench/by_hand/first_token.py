"""What `enginehouse run` does, by hand: an environment, the engine in it, the model, one question, the first token.

Knows nothing of enginehouse: PLACE holds `requirements.txt`, `launcher.py` and `model.json`, which says the model's
file, its options and the key. Run by bench/first_token.py, which measures it from its start to its first byte.

    python bench/by_hand/first_token.py PLACE UV PORT QUESTION
"""

import http.client
import json
import os
import subprocess
import sys
import time

place, uv, port, question = sys.argv[1:]
python = f"{place}/venv/bin/python"
with open(f"{place}/model.json") as file:
    model = json.load(file)
subprocess.run([uv, "venv", "-q", "--python", sys.executable, f"{place}/venv"], check=True)
install = [uv, "pip", "install", "-q", "--python", python, "--no-deps", "--require-hashes"]
subprocess.run([*install, "-r", f"{place}/requirements.txt"], check=True)
environment = {**os.environ, "ENGINEHOUSE_MODEL_FILE": f"{place}/model.json"}
engine = subprocess.Popen([python, "-I", f"{place}/launcher.py", "--addr", f"127.0.0.1:{port}"], env=environment)


def ask(method: str, path: str, body: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request(method, path, body, {"Authorization": f"Bearer {model['key']}"})
    return connection.getresponse()


def is_ready() -> bool:
    try:
        return ask("GET", "/health").status == 200
    except ConnectionError:
        return False


while not is_ready() and engine.poll() is None:
    time.sleep(0.005)
messages = [{"role": "user", "content": question}]
for line in ask("POST", "/v1/chat/completions", json.dumps({"messages": messages, "stream": True, "temperature": 0})):
    if line.startswith(b"data: {") and (token := json.loads(line[6:])["choices"][0]["delta"].get("content")):
        print(token, flush=True)
        break
engine.terminate()
engine.wait()
