"""Upload of a written model, only when asked."""

from __future__ import annotations

from pathlib import Path

from trimegatron.errors import ConfigError, UserError


def check_hub() -> None:
    """Raises ConfigError where ``huggingface_hub`` is not installed; to be asked before hours of work."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--push-to-hub needs the huggingface_hub package. Run: pip install 'trimegatron[hub]', or leave it out"
        ) from error


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload the folder to the model repository ``OWNER/NAME``, which is made private where there is none; returns
    its address.

    Raises:
        UserError: it did not work; the folder is as it was.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, repo_type="model", private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload from trimegatron convert")
    except Exception as error:  # the library raises its HTTP client's errors, which change between versions
        raise UserError(
            f"{folder} is written, but could not be uploaded to {repository}: {type(error).__name__}: {error}"
        ) from error
    return str(address)
