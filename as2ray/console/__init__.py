"""The log on the console: lines, bars or JSON, of this process and of Ray's workers."""
