"""`make up-kubernetes`: Aerostat over a Kubernetes API server of its own on this machine, until Ctrl-C. Declare with `kubectl apply`.

It is how the tests run it: real API server, the chart's arguments and rights, one node, no kubelet and no images.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST, helm, programs
from aerostat_testing.kubernetes.chart import Chart
from aerostat_testing.kubernetes.served import ServedOnKubernetes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aerostat_testing.kubernetes.up", description=__doc__.splitlines()[0])
    parser.add_argument("--kubernetes-minor", default=LATEST, help="version of the API server (default %(default)s)")
    parser.add_argument("--operators", type=int, default=2, help="replicas of the operator (default %(default)s)")
    parser.add_argument("--routers", type=int, default=2, help="replicas of the router (default %(default)s)")
    parser.add_argument("--model-cache", type=Path, default=Path.home() / ".cache/aerostat/models", help="default %(default)s")
    args = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGINT):  # SIGINT too: whoever starts this in the background has it ignored
        signal.signal(signum, _interrupt)
    with tempfile.TemporaryDirectory(prefix="aerostat-kubernetes-") as folder:
        try:
            _serve(Path(folder), args)
        except KeyboardInterrupt:
            _say("stopped")


def _serve(folder: Path, args: argparse.Namespace) -> None:
    found = programs(args.kubernetes_minor)
    chart = Chart(helm=helm(), kubernetes=found.version, home=folder)
    with ApiServer(folder / "apiserver", found) as server:
        server.install_crds()
        server.run_controllers()
        (folder / "serving").mkdir()
        with ServedOnKubernetes(folder / "serving", server, chart, model_cache=args.model_cache) as served:
            served.start(n_operators=args.operators, n_routers=args.routers)
            _say(f"Kubernetes {found.version} is at {server.url}; logs: {folder}. In another terminal:\n")
            _say(f"    export KUBECONFIG={served.user_kubeconfig()} PATH={found.kubectl.parent}:$PATH")
            _say("    kubectl apply -f crds/samples/quickstart")
            _say("    kubectl get models --watch\n")
            for router in served.routers:
                _say(f"router: http://{router.http}/v1, gRPC {router.grpc}, admin http://{router.admin}")
            signal.pause()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
