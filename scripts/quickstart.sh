#!/usr/bin/env bash
# From a fresh machine to a first answer: environment, build, demonstration model, server, one chat question over HTTP.
#
#   scripts/quickstart.sh [--keep]        --keep leaves the server running and prints its address
#
# May be run again: what is there already is reused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

keep=no
for argument in "$@"; do
    case $argument in
    --keep) keep=yes ;;
    -h | --help)
        sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "unknown argument: $argument (only --keep is known)" ;;
    esac
done

make_environment .venv
install_repository .venv .

echo "Fetching the demonstration model"
model=$(.venv/bin/python scripts/fetch_demo_model.py)

port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
address=http://127.0.0.1:$port
log=.venv/llama-server.log
echo "Starting llama-server at $address with $model"
nohup .venv/bin/llama-server -m "$model" --host 127.0.0.1 --port "$port" -c 4096 >"$log" 2>&1 &
server=$!

stop_server() {
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}
trap stop_server EXIT

if ! .venv/bin/python - "$address" "$server" <<'PYTHON'; then
"""Wait until the server is ready, ask one question, print the answer and the server's timings."""
import json
import os
import sys
import time
import urllib.error
import urllib.request

address, server = sys.argv[1], int(sys.argv[2])
question = "What is the capital of France? Answer in one sentence."
http = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not get a request to this machine


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


deadline = time.monotonic() + 120
while True:
    try:
        http.open(address + "/health", timeout=5).close()
        break
    except OSError:  # connection refused, or 503 while the model is loading
        if not is_running(server):
            sys.exit("the server stopped while starting")
        if time.monotonic() > deadline:
            sys.exit("the server was not ready after 120 s")
        time.sleep(0.1)

body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
request = urllib.request.Request(
    address + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
try:
    with http.open(request, timeout=120) as response:
        answer = json.load(response)
except urllib.error.HTTPError as error:
    sys.exit(f"the server answered {error.code}: {error.read().decode(errors='replace')}")
timings = answer["timings"]
print(f"\nQuestion: {question}\nAnswer:   {answer['choices'][0]['message']['content'].strip()}\n")
for name, kind in (("prompt", "prompt"), ("answer", "predicted")):
    tokens, ms, rate = timings[f"{kind}_n"], timings[f"{kind}_ms"], timings[f"{kind}_per_second"]
    print(f"{name}  {tokens:4d} tokens  {ms:8.1f} ms  {rate:8.1f} tokens/s")
print()
PYTHON
    echo "The last lines of $log:" >&2
    tail -n 20 "$log" >&2
    exit 1
fi

if [ "$keep" = yes ]; then
    trap - EXIT
    disown "$server"
    echo "The server keeps running at $address (process $server). Stop it with: kill $server"
else
    stop_server
    trap - EXIT
    echo "Server stopped. Run again with --keep to leave it running."
fi
