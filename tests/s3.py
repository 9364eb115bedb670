"""An S3 server of the tests' own: moto's, in this process, for this and other processes."""

import logging
import os
from contextlib import contextmanager
from unittest.mock import patch

import boto3
from moto.server import ThreadedMotoServer
from patience import find_free_port

BUCKET = "runs"
ADDRESS = "127.0.0.1"


class S3:
    """A running server with one bucket.

    Attributes:
        environment: variables with which a process finds it.
    """

    def __init__(self):
        self.port = port = find_free_port()
        self._server = self._serve()
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{ADDRESS}:{port}",
        }
        with patch.dict(os.environ, self.environment):
            self.client = boto3.client("s3")
        self.client.create_bucket(Bucket=BUCKET)

    def _serve(self):
        server = ThreadedMotoServer(ADDRESS, self.port, verbose=False)
        server.start()
        return server

    def stop(self):
        self._server.stop()

    def start(self):
        """Serves again what it had."""
        self._server = self._serve()

    def list(self, prefix=""):
        """Keys below a prefix, and their sizes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}


@contextmanager
def s3_server():
    """Serves until the block ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3()
    try:
        yield server
    finally:
        server.stop()
