# Completion of PROGRAM for bash.

_PROGRAM() {
	# Words as PROGRAM gets them: bash has split them at "=" and ":".
	local words=() glue= word i
	for ((i = 0; i <= COMP_CWORD; i++)); do
		word=${COMP_WORDS[i]}
		if [[ $i -gt 1 && ( -n $glue || $word == [=:]* ) ]]; then
			words[${#words[@]} - 1]+=$word
		else
			words+=("$word")
		fi
		glue=
		if [[ $word == *[=:] ]]; then glue=1; fi
	done
	local current=${words[${#words[@]} - 1]} line= directive= ending
	local before= # the part of the word that bash takes for words of their own
	if [[ $current == *[=:]* ]]; then before=${current%"${current##*[=:]}"}; fi

	COMPREPLY=()
	while IFS= read -r line; do
		case $line in
		:*) directive=$line ;;
		*)
			line=${line%%$'\t'*}
			COMPREPLY+=("${line#"$before"}")
			;;
		esac
	done < <("${words[0]/#\~/$HOME}" __complete "${words[@]:1}" 2>/dev/null)

	case $directive in
	:nospace) compopt -o nospace 2>/dev/null ;;
	:files*)
		compopt -o filenames 2>/dev/null
		current=${current#"$before"}
		while IFS= read -r line; do
			COMPREPLY+=("$line")
		done < <(
			if [[ $directive == :files ]]; then
				compgen -f -- "$current"
			else
				compgen -d -- "$current"
				for ending in ${directive#:files}; do
					compgen -f -X "!*.$ending" -- "$current"
				done
			fi
		)
		;;
	esac
}

complete -F _PROGRAM PROGRAM
