#!/usr/bin/env bash
# The whole suite from a fresh clone: environment with the test extras, style checks, tests.
#
#   scripts/test.sh [pytest arguments]
#
# Files of tests run two at a time; -n 0 runs them one after the other.
# REQUIRE_TEST_MODELS=1 turns a model that cannot be fetched into a failure; TEST_MODEL_DIR says where models are cached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

make_environment .venv-test
install_repository .venv-test '.[test]' --config-settings=cmake.define.V100_WERROR=ON # our own warnings are errors here
PATH="$PWD/.venv-test/bin:$PATH" scripts/check.sh
exec .venv-test/bin/pytest -n 2 --dist loadfile "$@"
