"""Opens a local page for a trained ensemble: `python launch/serve.py --workdir=runs/soma_n4`.

The page shows the experts that a text is routed to, the loss of each character as colour, and a
continuation as it is drawn. It is only reachable from this machine, unless --host says otherwise.
Ctrl-C ends it.
"""

import ipaddress

from absl import flags

from soma_jax import cli, pretrained
from soma_jax.errors import SomaError

_ENSEMBLE = cli.define_ensemble()
_HOST = flags.DEFINE_string("host", "127.0.0.1", "the address to listen at")
_PORT = flags.DEFINE_integer("port", 8000, "the port; 0: any that is free", 0, 65535)


def main() -> None:
    cli.use_host_devices(0)
    from soma_jax import serve  # late: its extra may be missing

    try:
        address = ipaddress.ip_address(_HOST.value)
    except ValueError as error:
        raise SomaError(f"--host={_HOST.value} is not an IP address") from error
    hosts = ["127.0.0.1", "localhost", "[::1]", _HOST.value] if address.is_loopback else ["*"]
    serve.run(pretrained.load(_ENSEMBLE()), hosts, _HOST.value, _PORT.value)


if __name__ == "__main__":
    cli.run(main)
