# SPDX-License-Identifier: Apache-2.0
# The engine, and nothing else: one process beside a stock vLLM frontend. docs/docker.md says how to run it.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1 \
    PIP_ONLY_BINARY=:all: \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Dependencies first: they change less often than the code, and are most of the image. Out of them goes what only tests,
# compilers and people at a prompt use. They are compiled here, since a read-only container cannot keep what it compiles,
# and by hash instead of by time, so that every build gives the same files.
COPY requirements.lock ./
RUN python -m venv --without-pip /opt/mockengine \
    && python -m pip --python /opt/mockengine/bin/python install --require-hashes --requirement requirements.lock \
    && find /opt/mockengine/lib -depth \( -type d \( -name tests -o -path '*/numpy/_core/include' -o -path '*/numpy/f2py' \) \
         -o -type f \( -name '*.a' -o -name '*.h' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.pyx' \) \) -exec rm -r {} + \
    && find /opt/mockengine/bin -type f -delete \
    && rm -r /opt/mockengine/include \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/mockengine/lib
# The code in a folder of its own, so that a new version of it is one small layer.
COPY requirements-build.lock ./
RUN python -m pip install --require-hashes --requirement requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY mockengine mockengine
RUN python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist . \
    && python -m pip --python /opt/mockengine/bin/python install --no-index --no-deps --prefix /opt/code dist/*.whl \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/code/lib

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="mockengine" \
      org.opencontainers.image.description="Plays vLLM's engine core: a real vLLM frontend joins it and behaves as in production, with no GPU and no weights." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The mockengine developers"
# The base has its standard library in source only: every start and every health check would compile it.
# Nothing is installed or built any more, so pip and the C headers go.
RUN python -m compileall -q --invalidation-mode unchecked-hash \
      -x '/(ensurepip|idlelib|lib2to3|pydoc_data|site-packages|test|tkinter|turtledemo)/' /usr/local/lib/python3.* \
    && rm -rf /usr/local/bin/pip* /usr/local/include /usr/local/lib/python3.*/ensurepip \
         /usr/local/lib/python3.*/site-packages/* \
    && install --directory --owner 10001 --group 10001 /var/lib/mockengine
COPY --from=build /opt/mockengine /opt/mockengine
COPY --from=build /opt/code /opt/mockengine
COPY deploy/model /models/mock
COPY deploy/profiles /profiles
ENV PATH=/opt/mockengine/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MOCKENGINE_ADMIN_HOST=0.0.0.0 \
    MOCKENGINE_ADMIN_PORT=29555
USER 10001:10001
WORKDIR /var/lib/mockengine
EXPOSE 29555
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 CMD ["mockengine", "health"]
ENTRYPOINT ["mockengine"]
