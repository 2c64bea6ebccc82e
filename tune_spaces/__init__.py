"""Search spaces, one a file. Must not know how a trial is run."""
