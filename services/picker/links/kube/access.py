"""Where Kubernetes' API is, and the credentials for it: of the pod, or from settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.picker.config import PickerConfig
from services.picker.core.inference_pool import split_pool
from services.runtime.config import ConfigError
from services.runtime.network.channel import host_port

# Kubernetes mounts the credentials of a pod's service account here.
FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """`token_file` and `ca_file` empty: no token; the system's certificate authorities."""

    url: str
    namespace: str
    pool: str
    token_file: str = ""
    ca_file: str = ""

    @classmethod
    def find(
        cls, config: PickerConfig, environment: Mapping[str, str], folder: Path = FOLDER
    ) -> Self:
        """The API that the settings name, else that of the cluster which the process runs in.
        Raises ConfigError outside of a cluster, unless the settings suffice."""
        namespace, pool = split_pool(config.pool)
        if config.kube_api:
            url, files = config.kube_api, (config.kube_token_file, config.kube_ca_file)
        elif environment.get(HOST):
            url = f"https://{host_port(environment[HOST], environment.get(PORT, '443'))}"
            token_file = config.kube_token_file or str(folder / "token")
            files = token_file, config.kube_ca_file or str(folder / "ca.crt")
        else:
            raise ConfigError(
                "picker.kube_api: this process runs outside of a cluster; give --kube-api URL, "
                "such as http://127.0.0.1:8001 of `kubectl proxy`"
            )
        for file in filter(None, files):
            if not Path(file).is_file():
                raise ConfigError(
                    f"{file}: the file does not exist; mount the pod's service account "
                    "(automountServiceAccountToken), or set picker.kube_token_file and "
                    "picker.kube_ca_file"
                )
        return cls(url, namespace or _own_namespace(folder), pool, *files)


def _own_namespace(folder: Path) -> str:
    try:
        return (folder / "namespace").read_text().strip()
    except OSError:
        raise ConfigError(
            "picker.pool: the namespace of this process is unknown; write NAMESPACE/NAME"
        ) from None
