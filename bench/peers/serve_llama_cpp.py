"""llama.cpp as a side of `bench.engine`: its server on the loopback, a slot for each request, continuous batching.

Needs no package: a build of llama.cpp (`--build`, with bin/llama-server) and a GGUF file of the model.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import workload

SLOTS = max(one.sequences for one in workload.WORKLOADS.values())
SLOT_TOKENS = 1280



class Server:
    """llama-server as a child process; `pid` is where its work is done."""

    def __init__(self, build: Path, model: Path, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [str(build / "bin" / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["-t", str(threads), "-tb", str(threads), "-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS)]
        command += ["-fa", "auto", "-b", "2048", "-ub", "512", "-cb", "--cache-ram", "0", "--no-warmup"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.pid = self._process.pid
        while self._status() != 200:
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with {self._process.returncode}")
            time.sleep(0.1)

    def _status(self) -> int:
        try:
            return self.ask("GET", "/health")[0]
        except OSError:
            return 0

    def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, prompt: list[int], count: int, slot: int | None) -> list[int]:
        body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
        body |= {"return_tokens": True, "samplers": ["temperature"]} | ({} if slot is None else {"id_slot": slot})
        status, answer = self.ask("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server: {status} {answer[:200]!r}")
        return json.loads(answer)["tokens"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = workload.arguments()
    parser.add_argument("--build", required=True)
    parser.add_argument("--gguf", required=True, help="folder with MODEL-DTYPE.gguf")
    options = parser.parse_args()
    file = Path(options.gguf) / f"{Path(options.model).name}-{options.dtype}.gguf"
    began = time.perf_counter()
    server = Server(Path(options.build), file, options.threads)
    loaded = time.perf_counter() - began
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    callers = concurrent.futures.ThreadPoolExecutor(2 * SLOTS)

    def generate(prompts: list[list[int]], count: int, conversations: Sequence[int] | None) -> list[list[int]]:
        slots = [None] * len(prompts) if conversations is None else list(conversations)
        futures = [callers.submit(server.complete, ids, count, slot) for ids, slot in zip(prompts, slots, strict=True)]
        return [future.result() for future in futures]

    try:
        about = {"side": "llama", "version": str(options.build), "load_s": loaded}
        workload.serve(about, vocab_size, generate, pids=[server.pid])
    finally:
        server.close()


if __name__ == "__main__":
    main()
