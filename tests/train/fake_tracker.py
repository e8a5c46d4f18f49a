"""The process of a tracker with a library that writes lines to a file, and fails as FAKE_TRACKER says."""

import json
import os
import sys
import time

from megajax.train.tracking import libraries, process


class Fake:
    """Appends what it is given to a file, as JSON."""

    def __init__(self, request):
        self.how, self.path, self.place = os.environ["FAKE_TRACKER"], os.environ["FAKE_TRACKER_FILE"], "here"
        if self.how == "raises at the start":
            raise ValueError("no key")
        if self.how == "blocks at the start":
            time.sleep(3600)
        known = libraries.kept_id(request)
        libraries.keep_id(request, known or f"id of {request['name']}")
        self._write({"request": request, "known": known})

    def _write(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self, records):
        if self.how == "raises" and records[0]["step"] < 100:
            raise OSError("no network")
        if self.how == "blocks":
            time.sleep(3600)
        if self.how == "slow":
            time.sleep(1.0)
        if self.how == "dies":
            os._exit(7)
        self._write({"records": records})

    def artifact(self, path):
        self._write({"artifact": path, "files": sorted(os.listdir(path))})

    def end(self, state, reason):
        if self.how == "blocks at the end":
            time.sleep(3600)
        self._write({"state": state, "reason": reason})


if __name__ == "__main__":
    libraries.LIBRARIES["wandb"] = Fake
    sys.exit(process.main())
