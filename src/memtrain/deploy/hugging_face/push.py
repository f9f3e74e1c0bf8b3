"""Upload the folder of an export to huggingface.co."""

from pathlib import Path

from memtrain.errors import MemtrainError, describe_error


def check_push(repository: str) -> None:
    """Refuse a name that is not USER/NAME, and an upload without a token."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise MemtrainError(f"--push {repository}: {describe_error(error)}") from None
    if repository.count("/") != 1:
        raise MemtrainError(f"--push {repository}: must be USER/NAME, as on huggingface.co")
    if not get_token():
        raise MemtrainError(
            f"--push {repository}: needs a token of huggingface.co with write access; "
            "hf auth login, or set HF_TOKEN"
        )


def push_folder(path: Path, files: list[str], repository: str) -> str:
    """Upload the files of an export, and nothing else that is in the folder; returns the address.

    Raises:
        MemtrainError: the upload failed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=path,
            allow_patterns=files,
            commit_message="Upload a network trained with memtrain",
        )
    except Exception as error:  # its own errors have no common class
        raise MemtrainError(
            f"--push {repository}: {describe_error(error)}; the files are in {path}"
        ) from None
    return str(address)
