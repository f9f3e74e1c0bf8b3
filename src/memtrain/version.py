"""The version, alone in a module that imports nothing, so that packaging can read it."""

VERSION = "0.1.0.dev0"
