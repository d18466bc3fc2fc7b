"""Select the environment variables that reach the processes of a local cluster.

Ray's processes, and so all workers, would inherit the whole environment of the program
that starts them, including every token of its shell, even if workers run other people's
code. They get the variables that a process needs to find its files, libraries and
devices, and those that the caller names. A name that looks like a secret
(`redaction.is_secret_variable`) passes only if it is given in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from rl_distributed.errors import ConfigError
from rl_distributed.redaction import is_secret_variable

__all__ = [
    "PASSED_VARIABLES",
    "check_pass_env",
    "passed_variables",
    "withheld_variables",
]

# Without them a process of Ray cannot talk to the others.
_OF_RAY = ("RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY")

PASSED_VARIABLES = (
    # The user and the machine.
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TZ", "TERM", "COLORTERM"),
    *("NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE", "LC_*", "XDG_*"),
    *("TMPDIR", "TMP", "TEMP"),
    # Programs, libraries and interpreters, and what builds kernels at run time.
    *("PATH", "LD_*", "DYLD_*", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH"),
    *("CPLUS_INCLUDE_PATH", "CC", "CXX", "CUDAHOSTCXX", "MAX_JOBS", "NIX_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "COV*"),
    # The network.
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NCCL_*", "RCCL_*", "GLOO_*", "TP_SOCKET_IFNAME", "UCX_*", "UCC_*", "FI_*"),
    *("OFI_*", "IBV_*", "MLX5_*", "NVSHMEM_*"),
    # Threads, memory and devices.
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),
    *("VECLIB_*", "MALLOC_*", "GLIBC_TUNABLES", "NUMBA_*", "DNNL_*", "ONEDNN_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NVTE_*", "HIP_*", "HSA_*"),
    *("ROCR_*", "ROCM_*", "GPU_*", "ZE_*", "SYCL_*", "ONEAPI_*", "TPU_*", "XLA_*"),
    *("ASCEND_*", "DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM"),
    *("SDL_*", "EGL_*", "LIBGL_*", "MESA_*"),
    # Libraries that are set up by variables.
    *("RAY_*", "RL_*", "TORCH*", "PYTORCH_*", "TRITON_*", "JAX_*", "TF_CPP_*"),
    *("TF_FORCE_*", "TF_ENABLE_*", "TF_GPU_*", "TF_NUM_*", "TF_XLA_*"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKEN*_PARALLELISM"),
    *("SAFETENSORS_*", "ACCELERATE_*", "VLLM_*", "SGLANG_*", "SGL_*", "FLASHINFER_*"),
    *("MEGATRON_*", "LMCACHE_*", "NLTK_DATA", "MPLBACKEND", "MPLCONFIGDIR"),
    *("DO_NOT_TRACK", "RUST_LOG", "RUST_BACKTRACE"),
    # Batch systems.
    *("SLURM_*", "SLURMD_*", "PBS_*", "LSB_*", "SGE_*", "PMI_*", "PMIX_*", "OMPI_*"),
)
"""Names, and patterns of names, that pass without being asked for."""


def check_pass_env(names: Collection[str]) -> None:
    """Check names and patterns that a caller wants to pass.

    Raises:
        ConfigError: one is no text, or holds a value.
    """
    if isinstance(names, str):
        raise ConfigError(
            f"pass_env must be a list of names: got the string {names!r}; write "
            f"[{names!r}]"
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"pass_env must hold names of variables: got {name!r}")
        if "=" in name:
            raise ConfigError(
                f"pass_env names variables and gives them no values: got "
                f"{name.partition('=')[0]}=...; name it, and set it in the environment"
            )


def passed_variables(
    variables: Mapping[str, str], pass_env: Iterable[str] = ()
) -> dict[str, str]:
    """Return those variables that processes of a local cluster get.

    Args:
        variables: all of them.
        pass_env: further names, or patterns as of a shell (`MY_*`). A pattern passes no
            secret, a full name does.
    """
    patterns = (*PASSED_VARIABLES, *pass_env)
    named = {*_OF_RAY, *pass_env}
    return {
        name: value
        for name, value in variables.items()
        if name in named
        or (
            not is_secret_variable(name)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
        )
    }


def withheld_variables(
    variables: Mapping[str, str], pass_env: Iterable[str] = ()
) -> list[str]:
    """Return the names of the variables that are withheld, in order."""
    return sorted(variables.keys() - passed_variables(variables, pass_env))
