"""`fluxq quantize --push-to-hub`: a finished checkpoint becomes a model repository of the Hugging Face hub.

A model that may not be published is refused before the work starts. The folder is uploaded as it is, in one commit.
"""

from __future__ import annotations

from pathlib import Path

from fluxq.base.console import first_line
from fluxq.base.model import ModelFolder
from fluxq.quantize.record import Record

_NO_NAMES = ("other", "unknown")  # values of `license:` beside which another field has to name it


def require_pushable(repo: str, folder: ModelFolder, check: bool) -> None:
    """Raise ValueError unless the base model names a licence, the closing check will run and the hub knows the user."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)  # its ValueError names the fault
    fields = folder.license
    if "license" not in fields or (fields["license"].lower() in _NO_NAMES and "license_name" not in fields):
        raise ValueError(
            f"{folder.name} names no licence (`license:` in the front matter of its README.md, and `license_name:` of "
            "one that the hub has no word for), so nobody could tell what others may do with the checkpoint: add it "
            "there, or leave out --push-to-hub"
        )
    if not check:
        raise ValueError("--push-to-hub uploads only what passed the closing check: leave out --no-check")
    try:
        HfApi().whoami()
    except Exception as error:  # no connection is an error of the client's own HTTP library
        raise ValueError(f"the hub cannot tell who you are ({first_line(error)}): run `hf auth login` first") from None


def push(output: Path, record: Record, repo: str, private: bool) -> str:
    """Upload a checkpoint folder whose closing check passed, and return the repository's address.

    Raises ValueError where that check did not pass and OSError, naming the folder, where the upload does not.
    """
    from huggingface_hub import HfApi

    if not (record.check and record.check.passed):
        raise ValueError(f"{output}: its closing check did not pass, so it is not uploaded")
    api = HfApi()
    message = f"{record.model.name} quantized with fluxq {record.fluxq_version} ({record.recipe.name})"
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)  # a name alone is one of the user's
        api.upload_folder(repo_id=address.repo_id, folder_path=output, commit_message=message)
    except Exception as error:  # as above
        raise OSError(
            f"{output} is complete but not uploaded to {repo} ({first_line(error)}); the same command "
            "without --overwrite only uploads it"
        ) from None
    return str(address)
