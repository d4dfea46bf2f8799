"""The metadata that depends on where the package is published; pyproject.toml has all the rest.

With REPOSITORY_URL, which the release workflow sets, the addresses of the project are in the metadata and the links of
the README lead to the files of this version in the repository. Without it there are none, and links stay as they are.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

VERSION = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
readme = Path("README.md").read_text(encoding="utf-8")
urls = {}
if address := os.environ.get("REPOSITORY_URL"):
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{address}/raw/v{VERSION}/", readme)
    readme = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{address}/blob/v{VERSION}/", readme)
    pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs/index.md", "Security": "SECURITY.md"}
    urls = {name: f"{address}/blob/v{VERSION}/{page}" for name, page in pages.items()}
    urls |= {"Repository": address, "Issues": f"{address}/issues"}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
