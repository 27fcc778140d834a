"""Where schedsearch meets other projects; each module needs the one it is named after."""
