"""The commands of `as2ray`, a file each. Must hold no logic of their own."""
